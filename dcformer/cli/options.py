"""Options and arguments that several commands share."""

from typing import Annotated, Literal

import typer


# For groups of commands: the option --help without a value would make typer import pydantic to convert it, which takes
# a third of the time of a help text.
QUICK_HELP = {"default_map": {"help": False}}

Step = Annotated[
    int | None, typer.Option(help="The training step to read from a run folder; the latest one unless given.")
]
TrainConfig = Annotated[
    str | None, typer.Option(help="The YAML file with the training configuration of a MaxText run.")
]
PaxConfig = Annotated[str | None, typer.Option("--config", help="The config.json that describes a PAX checkpoint.")]
Dtype = Annotated[
    Literal["bfloat16", "float16", "float32"] | None,
    typer.Option(help="Number type of the parameters; that of the stored weights unless given."),
]
Device = Annotated[
    str | None,
    typer.Option(help="The device to run on, such as cuda:0, mps or cpu; a CUDA GPU if there is one unless given."),
]
Tokenizer = Annotated[
    str | None, typer.Option(help="A tokenizer folder, tokenizer.json file or Hub name in place of the model's.")
]
Revision = Annotated[
    str | None, typer.Option(help="The branch, tag or commit of the model on the Hub; main unless given.")
]
# Of `generate()`.
DoSample = Annotated[
    bool | None,
    typer.Option(
        "--do-sample/--greedy",
        help="Draw each token by its probability, or take the likeliest; what generation_config.json says unless "
        "given.",
        show_default=False,
    ),
]
Temperature = Annotated[
    float | None, typer.Option(help="Divide the logits by this number before drawing; above 1 surprises more.")
]
TopK = Annotated[int | None, typer.Option(help="Draw from this many likeliest tokens only; 0 draws from all of them.")]
TopP = Annotated[float | None, typer.Option(help="Draw from the likeliest tokens that together have this probability.")]
MinP = Annotated[
    float | None,
    typer.Option(help="Draw from tokens that have at least this share of the likeliest one's probability."),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Make tokens that are already there less likely, if above 1.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error instead of one line.")]
