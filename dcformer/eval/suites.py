"""Names and descriptions of tasks, and the suites of them that `dcformer eval` runs.

In lm-eval the names have a prefix, so that they differ from lm-eval's tasks; here, in results and in tables they have
none.
"""

import functools
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import task_data
from .task_data import TABLE4_COLUMNS, import_extra


PREFIX = "dcformer_"
OTHERS = "lm_eval_"  # begins names of tasks of lm-eval that would otherwise be names of this package
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


def find_tasks(
    suite: str | Sequence[str] = "table4",
    tasks: str | Iterable[str] | None = None,
    include_path: str | os.PathLike | None = None,
) -> tuple[str, ...]:
    """
    Names of the tasks to run, without duplicates.

    Args:
        suite (defaults to `"table4"`): Suites, as a list or separated by commas.
        tasks (*optional*): Tasks or suites, run instead of `suite`; with or without the prefix `dcformer_`. Other names
            are of tasks, groups and tags of lm-eval; where it shares a name with this package, its task is `lm_eval_`
            and the name.
        include_path (*optional*): A folder with further tasks of lm-eval, in YAML.

    Raises:
        ValueError: for an unknown name; the message lists the known ones.
    """
    return tuple(find_entries(suite, tasks, include_path))


def find_entries(
    suite: str | Sequence[str], tasks: str | Iterable[str] | None, include_path: str | os.PathLike | None
) -> dict[str, Any]:
    """The tasks of `find_tasks`, each with its `cfg` and `yaml_path` as lm-eval's index has them."""
    kind, known, names = "suite", SUITES, _split(suite)
    if tasks is not None:
        kind, known, names = "task", {**SUITES, **{task: (task,) for task in _described()}}, _split(tasks)
    included, found = _included(include_path), dict[str, Any]()
    for name in names or [""]:
        if name in known and name in included:
            raise ValueError(
                f"There are two tasks {name!r}: {PREFIX}{name} is of this package, {OTHERS}{name} in {include_path!r}."
            )
        if (short := name.removeprefix(PREFIX)) in known:
            found |= {task: _entry_of_ours(task) for task in known[short]}
        elif leaves := _leaves(name, included) if kind == "task" and name else []:
            taken = {*known, "average", *task_data.SOURCES}  # also names that reports and cards give a meaning
            found |= {OTHERS + leaf.name if leaf.name in taken else leaf.name: leaf for leaf in leaves}
        else:
            more = ", from lm-eval's (`dcformer lm-eval ls tasks`) and .yaml files of --include-path"
            raise ValueError(
                f"There is no {kind} {name!r}; choose from {', '.join(known)}{more if kind == 'task' else ''}."
                f"{_unread(include_path)}"
            )
    return found


def _entry_of_ours(task: str) -> Any:
    """A task of this package as lm-eval's index has it, without an index, for which every file would be read."""
    file, load_yaml = _definition(task), import_extra("lm_eval.tasks._yaml_loader").load_yaml
    return SimpleNamespace(cfg=load_yaml(file, resolve_func=False), yaml_path=file)


def _definition(task: str) -> Path:
    """The file that defines a task, if it is of this package."""
    return tasks_folder() / f"{PREFIX}{task}.yaml"


def _leaves(name: str, included: Mapping[str, Any]) -> list[Any]:
    """The tasks that a name of lm-eval stands for: itself, or the members of a group or a tag."""
    names = (name, name.removeprefix(OTHERS))
    index = included if any(spelt in included for spelt in names) else _of_lm_eval()
    entry = next((index[spelt] for spelt in names if spelt in index), None)
    if entry is None or entry.kind.name not in ("GROUP", "TAG"):
        return [] if entry is None else [entry]
    members = sorted(entry.tags) or entry.cfg["task"]
    fields = import_extra("lm_eval.tasks._factory").GROUP_FIELD_NAMES
    if (entry.cfg or {}).keys() - fields - {"tag"} or not all(isinstance(member, str) for member in members):
        raise ValueError(f"The group {name!r} has settings for its tasks; name these, or use `dcformer lm-eval`.")
    leaves = [_leaves(member, included) for member in members]
    if [] in leaves:
        raise ValueError(f"There is no task {members[leaves.index([])]!r}, which {name!r} names.")
    return list(itertools.chain(*leaves))


@functools.cache
def _of_lm_eval() -> Mapping[str, Any]:
    """The index of lm-eval's own tasks, for which it reads thousands of files."""
    return import_extra("lm_eval.tasks").TaskManager().task_index


def _included(include_path: str | os.PathLike | None) -> Mapping[str, Any]:
    if include_path is None:
        return {}
    if not Path(include_path).is_dir():
        raise FileNotFoundError(f"There is no folder {os.fspath(include_path)!r}, as --include-path names.")
    return import_extra("lm_eval.tasks").TaskManager(include_path=include_path, include_defaults=False).task_index


def _unread(include_path: str | os.PathLike | None) -> str:
    """A sentence on a file that lm-eval passes over since it cannot read it, if there is one."""
    for file in sorted(Path(include_path).rglob("*.yaml")) if include_path else ():
        try:
            import_extra("lm_eval.tasks._yaml_loader").load_yaml(file, resolve_func=False)
        except Exception as error:  # of YAML, of Python, of a file that is not there
            return f" {str(file)!r} cannot be read: {error}"
    return ""


def is_ours(task: str) -> bool:
    """True if a task is of this package."""
    return _definition(task).is_file()


def harness_name(task: str) -> str:
    """The name of a task in lm-eval's results."""
    return PREFIX + task if is_ours(task) else task


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
