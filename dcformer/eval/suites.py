"""Names and descriptions of tasks, and the suites of them that `dcformer eval` runs.

In lm-eval the names have a prefix, so that they differ from lm-eval's tasks; here, in results and in tables they have
none.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import task_data
from .task_data import TABLE4_COLUMNS, import_extra


PREFIX = "dcformer_"
# The authors' texts of head tasks, with 2 to 7 examples before the answer.
AUTHORS_TASKS = tuple(f"head_tasks_authors_k{shots}" for shots in range(2, 8))
HEAD_TASKS = ("head_tasks", *AUTHORS_TASKS)
PERPLEXITY_TASKS = ("pile_ppl", "flan_ppl", "wikitext2_ppl")
# Columns with the prompts of lm-eval 0.4.13, where these differ from those of 2023.
OTHER_PROMPTS = tuple(f"{column}_lm_eval_0_4_13" for column in ("lambada_openai", "sciq", "race_middle", "race_high"))
SUITES = {
    "table4": TABLE4_COLUMNS,
    "head_tasks": HEAD_TASKS,
    "head_tasks_authors": AUTHORS_TASKS,
    "perplexity": PERPLEXITY_TASKS[:2],
    "wikitext2": PERPLEXITY_TASKS[2:],
    "all": (*TABLE4_COLUMNS, *HEAD_TASKS, *PERPLEXITY_TASKS),
    "lm_eval_0_4_13": OTHER_PROMPTS,
}
TASKS = (*SUITES["all"], *OTHER_PROMPTS)  # those of the package; others lie beside them in `tasks_folder`


@dataclass(frozen=True)
class TaskSummary:
    """A task in a few words."""

    name: str  #: for `--tasks`
    suite: str  #: that it belongs to, for `--suite`
    asks: str  #: what the model is asked for
    paper_shots: tuple[int, ...]  #: numbers of examples before the question in the paper; empty if it has no result


def list_tasks() -> list[TaskSummary]:
    """All tasks, those of suites first and in their order; the definitions are in [`dcformer.eval.tasks_folder`]."""
    shots = {
        **dict.fromkeys(TABLE4_COLUMNS, (0, 5)),
        **{task: (int(task[-1]),) for task in AUTHORS_TASKS},
        **dict.fromkeys(SUITES["perplexity"], (0,)),
    }
    suite_of = {task: suite for suite, tasks in reversed(SUITES.items()) if suite != "all" for task in tasks}
    return [
        TaskSummary(task, suite_of.get(task, "-"), asks, shots.get(task, ())) for task, asks in _described().items()
    ]


def _described() -> dict[str, str]:
    """All tasks with what they ask for, the comment that their files begin with."""
    described = dict.fromkeys(TASKS, "")
    for file in sorted(tasks_folder().glob(f"{PREFIX}*.yaml")):
        text = file.read_text(encoding="utf-8")
        if re.search(rf"^task: *['\"]?{file.stem}['\"]? *$", text, re.M):  # else a group
            comment = text.partition("\n")[0] if text.startswith("#") else ""
            described[file.stem.removeprefix(PREFIX)] = comment.strip("# ")
    return described


def find_tasks(suite: str | Sequence[str] = "table4", tasks: str | Iterable[str] | None = None) -> tuple[str, ...]:
    """
    Names of the tasks to run, without duplicates.

    Args:
        suite (defaults to `"table4"`): Suites, as a list or separated by commas.
        tasks (*optional*): Tasks or suites, run instead of `suite`; with or without the prefix `dcformer_`.

    Raises:
        ValueError: for an unknown name; the message lists the known ones.
    """
    kind, names, known = "suite", _split(suite), SUITES
    if tasks is not None:
        kind, names = "task", [name.removeprefix(PREFIX) for name in _split(tasks)]
        known = {**SUITES, **{task: (task,) for task in _described()}}
    for name in names or [""]:
        if name not in known:
            raise ValueError(f"There is no {kind} {name!r}; choose from {', '.join(known)}.")
    return tuple(dict.fromkeys(task for name in names for task in known[name]))


def _split(names: str | Iterable[str]) -> list[str]:
    parts = names.split(",") if isinstance(names, str) else names
    return [part.strip() for part in parts if part.strip()]


def tasks_folder() -> Path:
    """The folder of the task definitions, for lm-eval's `--include_path`."""
    return task_data.TASKS_FOLDER


def task_manager(metadata: dict[str, Any] | None = None) -> Any:
    """The `TaskManager` of lm-eval with the tasks of this package alone."""
    tasks = import_extra("lm_eval.tasks")
    return tasks.TaskManager(include_path=tasks_folder(), include_defaults=False, metadata=metadata)
