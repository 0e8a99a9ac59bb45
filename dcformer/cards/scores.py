"""Scores as the Hub reads them: `model-index` in the metadata of a card, and `.eval_results/*.yaml` beside it.

Scores of `dcformer eval` are ours and have no source. Figures of the paper name the paper as theirs; the paper does not
say which split of a data set it used, so neither do they, and the Hub keeps the two apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult, EvalResultEntry

from ..eval import published
from ..eval.data import SOURCES, data_folders
from ..eval.records import Record
from ..eval.suites import AUTHORS_TASKS
from ..eval.table4_tasks import TABLE4_COLUMNS, scored_split
from ..model_card import PAPER_URL


PAPER_NAME = "Xiao et al., Improving Transformers with Dynamically Composable Multi-Head Attention, Table 4"
MEASURED_BY = "dcformer eval"
PAPER_SHOTS = (0, 5)
_PILE = "EleutherAI/pile"
_METRIC_TYPES = {"acc": "accuracy", "acc_first_token": "accuracy"}


@dataclass(frozen=True)
class Score:
    """
    One number of a model.

    Attributes:
        task (`str`), num_fewshot (`int`), metric (`str`): What was measured, as `dcformer eval` calls it.
        value (`float`): Accuracies in percent.
        stderr (`float`, *optional*): Standard error, in the unit of the value.
        details (`str`): How it was measured; empty for the paper's.
        is_papers (`bool`): Whether the paper states it.
    """

    task: str
    num_fewshot: int
    metric: str
    value: float
    stderr: float | None = None
    details: str = ""
    is_papers: bool = False

    @property
    def dataset(self) -> tuple[str, str | None]:
        """Name of the data set and of its configuration."""
        if self.is_papers and self.task == "pile_ppl":
            return _PILE, None
        source = SOURCES[data_folders(self.task)[0]]
        return source.path, source.name

    @property
    def is_on_hub(self) -> bool:
        """Whether the data set is one of the Hub, which alone has leaderboards."""
        return SOURCES[data_folders(self.task)[0]].address is None

    @property
    def metric_type(self) -> str:
        return _METRIC_TYPES.get(self.metric, self.metric)

    def to_eval_result(self) -> EvalResult:
        """For `model-index`."""
        dataset, config = self.dataset
        arguments: dict[str, Any] = {"num_few_shot": self.num_fewshot}
        if not self.is_papers:
            arguments |= {"by": MEASURED_BY, "details": self.details}
        if self.stderr is not None:
            arguments["standard_error"] = self.stderr
        return EvalResult(
            task_type="text-generation",
            task_name="Text generation",
            dataset_type=dataset,
            dataset_name=self.task,
            dataset_config=config,
            dataset_split=None if self.is_papers else _split(self.task),
            metric_type=self.metric_type,
            metric_value=self.value,
            metric_name=f"{self.task} {self.metric}, {self.num_fewshot}-shot",
            metric_args=arguments,
            source_name=PAPER_NAME if self.is_papers else None,
            source_url=PAPER_URL if self.is_papers else None,
        )

    def to_entry(self) -> EvalResultEntry:
        """For `.eval_results/*.yaml`."""
        dataset, config = self.dataset
        error = "" if self.stderr is None else f", standard error {self.stderr:.3g}"
        unit = " in percent" if self.metric.startswith("acc") else ""
        how = f"; {self.details}" if self.details else ""
        return EvalResultEntry(
            dataset_id=dataset,
            task_id=config or "default",
            value=self.value,
            source_url=PAPER_URL if self.is_papers else None,
            source_name=PAPER_NAME if self.is_papers else None,
            notes=f"{self.num_fewshot}-shot, {self.metric}{unit}{error}{how}",
        )


def measured_scores(records: Iterable[Record]) -> list[Score]:
    """The scores of records, in the paper's order of tasks."""
    order = {task: place for place, task in enumerate((*TABLE4_COLUMNS, *AUTHORS_TASKS))}
    ordered = sorted(records, key=lambda r: (r.num_fewshot, order.get(r.task, len(order)), r.task))
    return [
        Score(
            record.task,
            record.num_fewshot,
            metric,
            _in_percent(metric, measured["value"]),
            None if measured.get("stderr") is None else _in_percent(metric, measured["stderr"]),
            _details(record),
        )
        for record in ordered
        for metric, measured in record.metrics.items()
    ]


def paper_scores(row: str | None) -> list[Score]:
    """What Table 4 of the paper states of one of its models; nothing for any other."""
    scores = []
    for shots in PAPER_SHOTS:
        accuracies = published.paper_accuracies(row, shots)
        scores += [
            Score(task, shots, "acc", round(100 * accuracies[task], 1), is_papers=True)
            for task in TABLE4_COLUMNS
            if task in accuracies
        ]
    # Its sample of Flan was never published, so that no data set has the name of what was measured.
    if "pile_ppl" in (perplexities := published.paper_perplexities(row)):
        scores.append(Score("pile_ppl", 0, "token_perplexity", perplexities["pile_ppl"], is_papers=True))
    return scores


def is_ours(result: EvalResult) -> bool:
    """Whether a result in a card is one that this module made, measured or the paper's."""
    arguments = result.metric_args if isinstance(result.metric_args, dict) else {}
    return arguments.get("by") == MEASURED_BY or result.source_name == PAPER_NAME


def _split(task: str) -> str:
    return scored_split(task) if task in TABLE4_COLUMNS else "test"


def _in_percent(metric: str, value: float) -> float:
    return round(100 * value, 2) if metric.startswith("acc") else round(value, 4)


def _details(record: Record) -> str:
    """What one has to know to measure it again."""
    settings, versions = record.settings, record.settings.get("versions") or {}
    parts = {
        "": f"{record.num_samples} documents",
        "task version": settings.get("task_version"),
        "dtype": settings.get("dtype"),
        "oov_policy": settings.get("oov_policy"),
        "dcformer": versions.get("dcformer"),
        "lm_eval": versions.get("lm_eval"),
        "commit": settings.get("git_revision"),
    }
    return ", ".join(f"{name} {value}".strip() for name, value in parts.items() if value is not None)
