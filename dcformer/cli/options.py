"""Options and arguments that several commands share."""

from typing import Annotated

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
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error instead of one line.")]
