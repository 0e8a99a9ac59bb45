"""Names of recipes, suites, tasks and data that have changed: the old one is refused with the new one."""

from __future__ import annotations

from typing import Any


# What is named -> old name -> new name.
_HEAD_TASKS = {"composition": "head_tasks"}
RENAMED = {
    "recipe": {
        "composition-ablation": "head-tasks-ablation",
        "composition-seeds": "head-tasks-seeds",
        # The presets of these names are DCFormer++; the recipes were of GPT-3's architecture.
        **{f"dcformer-{size}": f"dcformer-gpt3-{size}" for size in ("405m", "834m", "1.4b")},
    },
    "suite": {**_HEAD_TASKS, "synthetic": "head_tasks_authors"},
    "task": {
        **_HEAD_TASKS,
        "synthetic": "head_tasks_authors",
        **{f"synthetic_k{shots}": f"head_tasks_authors_k{shots}" for shots in range(2, 8)},
    },
    "data.source": _HEAD_TASKS,
    "data.evaluation.source": _HEAD_TASKS,
    "tokenizer": _HEAD_TASKS,
    "sweep.evaluation": _HEAD_TASKS,
}


def refuse_old_name(kind: str, name: Any, note: str = "") -> None:
    """
    Raise an error that gives the new name of something that is called by its old one.

    Args:
        kind: A key of [`RENAMED`] or anything else, of which no name has changed; also what the error calls it.
        name: What the user gave.
        note: What else the sentence says at its end.

    Raises:
        ValueError: if that is an old name.
    """
    new = RENAMED.get(kind, {}).get(name) if isinstance(name, str) else None
    if new is not None:
        what = kind if "." in kind else f"The {kind}"
        raise ValueError(f"{what} {name!r} is called {new!r} now; give that name{note}.")


def with_current_names(recipe: dict[str, Any], where: str = "") -> dict[str, Any]:
    """
    The mapping of a recipe that an earlier version has written beside its results, with the names of today.

    Args:
        recipe: The whole mapping; it is not changed.
        where: Key of the mapping inside the recipe, for the levels below; empty for the recipe itself.
    """
    current: dict[str, Any] = {}
    for key, value in recipe.items():
        name = f"{where}.{key}" if where else key
        if isinstance(value, dict):
            current[key] = with_current_names(value, name)
        else:
            current[key] = RENAMED.get(name, {}).get(value, value) if isinstance(value, str) else value
    return current
