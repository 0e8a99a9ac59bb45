"""Reading the `conversion_report.json` of a folder, which may be anything: it lies where users work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


REPORT_FILE = "conversion_report.json"


def read_report(folder: Path) -> dict[str, Any] | None:
    """
    What the report of a folder holds; None if there is none.

    Raises:
        ValueError: if it is not what a conversion writes.
    """
    path = folder / REPORT_FILE
    if not path.is_file():
        return None
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON; copy it again or remove it.") from error
    if not isinstance(report, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(report).__name__}; copy it again or remove it.")
    is_valid = {
        "source": isinstance(source := report.get("source", {}), dict)
        and _is_number(source.get("step"), 0)
        and _is_number(source.get("layers_per_block"), 1),
        "tensors": _is_list_of(report.get("tensors", []), "parameter", "file"),
        "leaves": _is_list_of(report.get("leaves", []), "name"),
        "files": isinstance(files := report.get("files", []), list | dict) and all(isinstance(f, str) for f in files),
    }
    for name, valid in is_valid.items():
        if not valid:
            raise ValueError(f"{name} in {path} is not what a conversion writes; copy it again or remove it.")
    return report


def remembered_source(folder: Path) -> dict[str, Any]:
    """What the report of a folder knows of the checkpoint at the origin: `step` and `layers_per_block`, if known."""
    source = (read_report(folder) or {}).get("source", {})
    return {name: source[name] for name in ("step", "layers_per_block") if isinstance(source.get(name), int)}


def _is_number(value: Any, least: int) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least)


def _is_list_of(value: Any, *keys: str) -> bool:
    """Whether a value is a list of objects with a string under each of the keys."""
    return isinstance(value, list) and all(
        isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in keys) for entry in value
    )
