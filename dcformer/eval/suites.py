"""Names of tasks, what each asks, and the suites of them that `dcformer eval` runs.

lm-eval knows every task under a prefix, so that none is taken for one of its own; here, in results and in tables, they
go without it.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..common.renamed import refuse_old_name
from .data import SOURCES, data_folders
from .table4_tasks import OTHER_PROMPTS, TABLE4_COLUMNS


PREFIX = "dcformer_"
# The authors' texts of head tasks, with so many examples before the answer.
AUTHORS_TASKS = tuple(f"head_tasks_authors_k{shots}" for shots in range(2, 8))

SUITES = {
    "table4": TABLE4_COLUMNS,
    "head_tasks_authors": AUTHORS_TASKS,
    "perplexity": ("pile_ppl", "flan_ppl"),
    "wikitext2": ("wikitext2_ppl",),
}
PERPLEXITY_TASKS = (*SUITES["perplexity"], *SUITES["wikitext2"])
# "all" is what the paper reports and WikiText-2: a column of Table 4 is not asked twice.
SUITES["all"] = tuple(task for tasks in SUITES.values() for task in tasks)
SUITES["lm_eval_0_4_13"] = tuple(OTHER_PROMPTS)
TASKS = (*SUITES["all"], *OTHER_PROMPTS)
# Asked with as many examples before the question as one likes.
_WITH_EXAMPLES = (*TABLE4_COLUMNS, *OTHER_PROMPTS)
# It has no tasks of lm-eval and runs alone, see dcformer/head_tasks.
HEAD_TASKS = "head_tasks"

_TABLE4_SHOTS = (0, 5)  # those of the paper
_QUESTIONS = {
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
}


@dataclass(frozen=True)
class TaskSummary:
    """
    One line of the list of tasks.

    Attributes:
        name: Name of the task for `--tasks`; `"head_tasks"` is a suite only.
        suite: Suite that it belongs to, for `--suite`.
        asks: What a model has to find, in a few words.
        paper_shots: Numbers of examples before the question in the paper; empty where the paper has no such result.
        source: Where the data are published, or that they are generated.
    """

    name: str
    suite: str
    asks: str
    paper_shots: tuple[int, ...]
    source: str


def list_tasks() -> list[TaskSummary]:
    """All tasks in the order of the suites; their definitions are in [`dcformer.eval.tasks_folder`]."""
    summaries = [
        TaskSummary(task, suite, _question_of(task), _paper_shots(task), str(SOURCES[data_folders(task)[0]]))
        for suite, tasks in SUITES.items()
        if suite != "all"
        for task in tasks
    ]
    answers = "words found in one of several facts and transformed (section 4.3 of the paper)"
    generated = f"generated, and the texts of {SOURCES['synthetic']}"
    return [*summaries, TaskSummary(HEAD_TASKS, HEAD_TASKS, answers, (), generated)]


def _question_of(task: str) -> str:
    if task in AUTHORS_TASKS:
        return f"the answer of line {int(task[-1]) + 1} in the authors' texts of head tasks"
    if task in OTHER_PROMPTS:
        return f"{OTHER_PROMPTS[task]}, in the words of lm-eval 0.4.13 instead of those of 2023"
    return _QUESTIONS[task]


def _paper_shots(task: str) -> tuple[int, ...]:
    if task in TABLE4_COLUMNS:
        return _TABLE4_SHOTS
    if task in AUTHORS_TASKS:
        return (int(task[-1]),)
    return (0,) if task in SUITES["perplexity"] else ()


def find_tasks(suite: str | Sequence[str] = "table4", tasks: str | Iterable[str] | None = None) -> tuple[str, ...]:
    """
    Names of the tasks to run, each once.

    Args:
        suite (`str` or list, defaults to `"table4"`): Suites, as a list or separated by commas.
        tasks (`str` or list, *optional*): Tasks or suites, run instead of `suite`; with or without our prefix.

    Raises:
        ValueError: for a name that is none; the message lists those there are.
    """
    if tasks is not None:
        names = [name.removeprefix(PREFIX) for name in _split(tasks)]
        groups = [SUITES.get(name, (name,)) for name in names]
        kind, known = "task", (*TASKS, *SUITES)
    else:
        names = _split(suite)
        groups = [SUITES.get(name, ()) for name in names]
        kind, known = "suite", (*SUITES, HEAD_TASKS)
    for name in names:
        refuse_old_name(kind, name)
        if name == HEAD_TASKS:
            raise ValueError(f"The suite {HEAD_TASKS!r} is run alone; give --suite {HEAD_TASKS} and no --tasks.")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"There is no {kind} {name!r};{hint} choose from {', '.join(known)}.")
    if not names:
        raise ValueError(f"No {kind} is named; choose from {', '.join(known)}.")
    return tuple(dict.fromkeys(task for group in groups for task in group))


def shots_of(task: str, num_fewshot: Iterable[int]) -> tuple[int, ...]:
    """Numbers of shots of a task: those asked for in questions, 0 in others, whose prompts are complete."""
    return tuple(dict.fromkeys(num_fewshot)) if task in _WITH_EXAMPLES else (0,)


def depends_on_tokenizer(task: str) -> bool:
    """Whether a task's documents are made with the tokenizer and the length of the model."""
    return task not in _WITH_EXAMPLES


def _split(names: str | Iterable[str]) -> list[str]:
    parts = names.split(",") if isinstance(names, str) else names
    return [part.strip() for part in parts if part.strip()]
