"""`python -m dcformer.bench`: the same as `dcformer bench`, where neither typer nor rich is installed."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from .options import COMMANDS, HELP, Options


# How argparse reads an option that is no switch.
_TYPES: dict[str, type] = {"json": Path, "plot": Path, "seconds": float, "device": str, "dtype": str}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The values of `Options` by their names, and `debug`."""
    parser = argparse.ArgumentParser(prog="python -m dcformer.bench", description="Measure how fast everything is.")
    parser.add_argument("what", nargs="?", metavar="WHAT", help=f"{', '.join(COMMANDS)}. {HELP['what']}")
    for field in dataclasses.fields(Options):
        flag = f"--{field.name.replace('_', '-')}"
        if field.name == "what":
            continue
        if field.name == "compile":
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=HELP[field.name])
        elif field.default is False:
            parser.add_argument(flag, action="store_true", help=HELP[field.name])
        else:
            kind = _TYPES.get(field.name, int)
            parser.add_argument(flag, type=kind, default=field.default, help=HELP[field.name])
    parser.add_argument("--debug", action="store_true", help="Show the full traceback of an error instead of one line.")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; an error is one line on stderr and exit status 1."""
    values = vars(parse_arguments(arguments))
    debug = values.pop("debug")
    try:
        options = Options(**values)
        from .command import run_command

        return run_command(options)
    except Exception as error:
        if debug:
            raise
        print(f"Error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
