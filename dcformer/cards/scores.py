"""Scores as the Hub reads them: `model-index` in the metadata of a card, and `.eval_results/*.yaml` beside it.

Figures of the paper name it as their source. It does not say which split of a data set it used, so neither do they.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult, EvalResultEntry

from ..eval import AUTHORS_TASKS, TABLE4_COLUMNS, Record, published, source_of
from ..model_card import PAPER_URL


PAPER_NAME = "Xiao et al., Improving Transformers with Dynamically Composable Multi-Head Attention, Table 4"
MEASURED_BY = "dcformer eval"
PAPER_SHOTS = (0, 5)


@dataclass(frozen=True)
class Score:
    """One number of a model; accuracies and their standard errors are in percent."""

    task: str
    num_fewshot: int
    metric: str
    value: float
    stderr: float | None = None
    details: str = ""  # how it was measured; empty for the paper's
    is_papers: bool = False

    @property
    def is_on_hub(self) -> bool:
        """Whether the Hub has the data set, and so a place for the score in its leaderboards."""
        return source_of(self.task).is_on_hub

    @property
    def _dataset(self) -> tuple[str, str | None]:
        """Name and configuration of the data set."""
        if self.is_papers and self.task == "pile_ppl":
            return "EleutherAI/pile", None
        return source_of(self.task).path, source_of(self.task).name

    @property
    def _source(self) -> dict[str, str]:
        return {"source_name": PAPER_NAME, "source_url": PAPER_URL} if self.is_papers else {}

    def to_eval_result(self) -> EvalResult:
        """The score for `model-index`."""
        dataset, config = self._dataset
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
            dataset_split=None if self.is_papers else source_of(self.task).split,
            metric_type="accuracy" if self.metric.startswith("acc") else self.metric,
            metric_value=self.value,
            metric_name=f"{self.task} {self.metric}, {self.num_fewshot}-shot",
            metric_args=arguments,
            **self._source,
        )

    def to_entry(self) -> EvalResultEntry:
        """The score for `.eval_results/*.yaml`."""
        dataset, config = self._dataset
        unit = " in percent" if self.metric.startswith("acc") else ""
        error = "" if self.stderr is None else f", standard error {self.stderr:.3g}"
        how = f"; {self.details}" if self.details else ""
        notes = f"{self.num_fewshot}-shot, {self.metric}{unit}{error}{how}"
        return EvalResultEntry(
            dataset_id=dataset, task_id=config or "default", value=self.value, notes=notes, **self._source
        )


def measured_scores(records: Iterable[Record]) -> list[Score]:
    """The scores of records, in the paper's order of tasks."""
    order = {task: place for place, task in enumerate((*TABLE4_COLUMNS, *AUTHORS_TASKS))}
    scores = []
    for record in sorted(records, key=lambda r: (r.num_fewshot, order.get(r.task, len(order)), r.task)):
        for metric, measured in record.metrics.items():
            scale, digits = (100, 2) if metric.startswith("acc") else (1, 4)
            value, stderr = (
                None if number is None else round(scale * number, digits)
                for number in (measured["value"], measured.get("stderr"))
            )
            scores.append(Score(record.task, record.num_fewshot, metric, value, stderr, _details(record)))
    return scores


def _details(record: Record) -> str:
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


def paper_scores(row: str | None) -> list[Score]:
    """The paper's Table 4 for one of its models; nothing for any other."""
    scores = []
    for shots in PAPER_SHOTS:
        accuracies = published.paper_accuracies(row, shots)
        scores += [
            Score(task, shots, "acc", round(100 * accuracies[task], 1), is_papers=True)
            for task in TABLE4_COLUMNS
            if task in accuracies
        ]
    # Its sample of Flan was never published, so no data set has the name of what was measured.
    if "pile_ppl" in (perplexities := published.paper_perplexities(row)):
        scores.append(Score("pile_ppl", 0, "token_perplexity", perplexities["pile_ppl"], is_papers=True))
    return scores
