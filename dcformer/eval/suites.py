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
from .task_data import TABLE4_COLUMNS, import_extra, source_of


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

_ASKS = {
    "lambada_openai": "the last word of a passage",
    "piqa": "which of two ways reaches an everyday goal",
    "winogrande": "which of two names fills the blank of a sentence",
    "arc_easy": "a science question for schools, with three to five choices",
    "arc_challenge": "a harder science question for schools, with three to five choices",
    "sciq": "a science question about a given text, with four choices",
    "logiqa": "a question of logic about a passage, with four choices",
    "boolq": "yes or no about a passage",
    "hellaswag": "which of four sentences continues a story",
    "race_middle": "a question of a middle-school reading test, with four choices",
    "race_high": "a question of a high-school reading test, with four choices",
    "pile_ppl": "every token of documents of the Pile, as perplexity",
    "flan_ppl": "the answers of instructions of Flan, as perplexity",
    "wikitext2_ppl": "every token of the test articles of WikiText-2, as perplexity",
    "head_tasks": "a word of one of several facts, transformed (section 4.3); generated texts",
    **{task: f"the answer of line {int(task[-1]) + 1} in the authors' texts of head tasks" for task in AUTHORS_TASKS},
    **{task: f"{task[:-15]}, in the words of lm-eval 0.4.13 instead of those of 2023" for task in OTHER_PROMPTS},
}


@dataclass(frozen=True)
class TaskSummary:
    """
    A task in a few words.

    Attributes:
        name: Name of the task for `--tasks`.
        suite: Suite that it belongs to, for `--suite`.
        asks: What the model is asked for.
        paper_shots: Numbers of examples before the question in the paper; empty if the paper has no such result.
        source: Where the data are published, or `"generated"`.
    """

    name: str
    suite: str
    asks: str
    paper_shots: tuple[int, ...]
    source: str


def list_tasks() -> list[TaskSummary]:
    """All tasks, those of suites first and in their order; the definitions are in [`dcformer.eval.tasks_folder`]."""
    shots = {
        **dict.fromkeys(TABLE4_COLUMNS, (0, 5)),
        **{task: (int(task[-1]),) for task in AUTHORS_TASKS},
        **dict.fromkeys(SUITES["perplexity"], (0,)),
    }
    suite_of = {task: suite for suite, tasks in reversed(SUITES.items()) if suite != "all" for task in tasks}
    return [
        TaskSummary(task, suite_of.get(task, "-"), asks, shots.get(task, ()), str(source_of(task)))
        for task, asks in _described().items()
    ]


def _described() -> dict[str, str]:
    """All tasks with what they ask for: of those that are a file alone, the comment that it begins with."""
    described = {task: _ASKS[task] for task in TASKS}
    for file in sorted(tasks_folder().glob(f"{PREFIX}*.yaml")):
        text = file.read_text(encoding="utf-8")
        if re.search(rf"^task: *['\"]?{file.stem}['\"]? *$", text, re.M):  # else a group
            comment = text.partition("\n")[0] if text.startswith("#") else ""
            described.setdefault(file.stem.removeprefix(PREFIX), comment.strip("# "))
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


def shots_of(task: str, num_fewshot: Iterable[int]) -> tuple[int, ...]:
    """Numbers of shots of a task: `num_fewshot`, or 0 for head tasks and running text, which have complete prompts."""
    return (0,) if task in (*HEAD_TASKS, *PERPLEXITY_TASKS) else tuple(dict.fromkeys(num_fewshot))


def tasks_folder() -> Path:
    """The folder of the task definitions, for lm-eval's `--include_path`."""
    return task_data.TASKS_FOLDER


def task_manager(metadata: dict[str, Any] | None = None):
    """The `TaskManager` of lm-eval with the tasks of this package alone."""
    tasks = import_extra("lm_eval.tasks")
    return tasks.TaskManager(include_path=tasks_folder(), include_defaults=False, metadata=metadata)


def _split(names: str | Iterable[str]) -> list[str]:
    parts = names.split(",") if isinstance(names, str) else names
    return [part.strip() for part in parts if part.strip()]
