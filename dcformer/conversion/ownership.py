"""Which files of a folder a conversion wrote, as its `conversion_report.json` tells: only those may be replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report_file import REPORT_FILE, read_report


# What reports before the field `files` do not list.
_MODEL_FILES = {
    "README.md",
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
}
_ITEM_FILES = {"_METADATA", "checkpoint"}


def is_converted(folder: Path) -> bool:
    """Whether a conversion wrote a folder: a Transformers folder or a MaxText run."""
    try:
        report = read_report(folder)
    except ValueError:
        return False
    return report is not None and ("tensors" in report or "leaves" in report)


def foreign_files(folder: Path) -> list[str]:
    """The files below a converted folder that its conversion did not write, with paths relative to it, sorted."""
    report = read_report(folder) or {}
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    if "files" in report:
        known = {REPORT_FILE, *report["files"]}
        return sorted(path.as_posix() for path in files if path.as_posix() not in known)
    is_ours = _in_old_run if "leaves" in report else _in_old_model
    return sorted(path.as_posix() for path in files if not is_ours(path, report))


def _in_old_model(path: Path, report: dict[str, Any]) -> bool:
    return path.as_posix() in {REPORT_FILE, *_MODEL_FILES, *(record["file"] for record in report["tensors"])}


def _in_old_run(path: Path, report: dict[str, Any]) -> bool:
    if path.as_posix() in (REPORT_FILE, "train_config.yml"):
        return True
    *item, top = path.parts[:3]
    arrays = {"step", *(record["name"] for record in report["leaves"])}
    is_ours = top in arrays or (top in _ITEM_FILES and len(path.parts) == 3)
    return item == [str(report.get("step")), "state"] and is_ours
