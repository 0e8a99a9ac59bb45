"""The bundled models: trained by a recipe of this package on the head tasks, a folder each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


_FOLDER = Path(__file__).parent
_SEEDS = "seeds.json"


def pretrained_names() -> tuple[str, ...]:
    """Names of the bundled models."""
    return tuple(sorted(file.parent.name for file in _FOLDER.glob("*/config.json")))


def pretrained_path(name: str) -> str:
    """
    The folder of a bundled model, for `from_pretrained`.

    Args:
        name: Such as `"dcformer-tiny"`, or its baseline without composition, `"transformer-tiny"`.

    Raises:
        ValueError: if there is no such model.
    """
    names = pretrained_names()
    if name not in names:
        raise ValueError(f"There is no bundled model {name!r}; choose from {', '.join(names) or '(none)'}.")
    return str(_FOLDER / name)


def find_model_folder(name: str) -> str:
    """Where a model is: a folder, which goes before a bundled model of its name; else that model; else the name."""
    return pretrained_path(name) if name in pretrained_names() and not Path(name).is_dir() else name


def seed_results() -> dict[str, Any]:
    """
    Results of the bundled models for all their training seeds, those without weights included.

    Returns:
        `recipe` and `runs`: rows of `variant`, `seed`, `parameters`, `training` and `evaluation`, the last as
        [`dcformer.head_tasks.suite.evaluate_head_tasks`] returns it. Without a file of results there are no runs.
    """
    file = _FOLDER / _SEEDS
    if not file.is_file():
        return {"recipe": {}, "runs": []}
    return json.loads(file.read_text(encoding="utf-8"))
