"""Options that several commands share."""

from typing import Annotated, Literal

import typer


# Without this typer would import pydantic for the missing value of --help, which takes a third of a help's time.
QUICK_HELP = {"default_map": {"help": False}}

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A bundled model, a folder, or a name on the Hub.")]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: also for other machines.")]
Step = Annotated[int | None, typer.Option(help="Training step to read from a run folder.", show_default="the latest")]
TrainConfig = Annotated[
    str | None,
    typer.Option(help="Training YAML of a MaxText run.", show_default="train_config.yml beside the step, if any"),
]
PaxConfig = Annotated[str | None, typer.Option("--config", help="The config.json that describes a PAX checkpoint.")]
Dtype = Annotated[
    Literal["bfloat16", "float16", "float32"] | None,
    typer.Option(help="Data type of the parameters.", show_default="as stored"),
]
Device = Annotated[str | None, typer.Option(help="Such as cuda:1, mps or cpu.", show_default="the first GPU, else cpu")]
Tokenizer = Annotated[
    str | None, typer.Option(help="Bundled model, folder, tokenizer.json or Hub name.", show_default="the model's")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.", show_default="main")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")]
