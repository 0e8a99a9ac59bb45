"""The command line and the JSON file that the benchmarks share; times and tables are those of `dcformer.bench`."""

import argparse
from pathlib import Path
from typing import Any

import torch

from dcformer.bench import measure


CPU = torch.device("cpu")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    return parser


def write(args: argparse.Namespace, device: torch.device = CPU, **content: Any) -> None:
    """Write what was measured, where and with which options, if a file was asked for."""
    if args.json is not None:
        about = {"environment": measure.environment(device), "arguments": vars(args)}
        measure.write_json(args.json, {**about, **content})
