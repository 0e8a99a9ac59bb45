"""Scores as the Hub reads them, measured and the paper's, and how they come into the card of a folder.

Figures of the paper name it as their source. It does not say which split of a data set it used, so neither do they.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, eval_result_entries_to_yaml

from ..common.dtypes import dtype_name
from ..common.files import write_atomically
from ..configuration_dcformer import DCFormerConfig
from ..eval import (
    TABLE4_COLUMNS,
    Record,
    differences_from_published,
    in_paper_order,
    model_fingerprint,
    published,
    read_records,
    source_of,
)
from ..model_card import CARD_FILE, PAPER_URL, table, without_signature, write_card


PAPER_NAME = "Xiao et al., Improving Transformers with Dynamically Composable Multi-Head Attention, Table 4"
MEASURED_BY = "dcformer eval"
PAPER_SHOTS = (0, 5)
_ENTRIES = re.compile(r"\w+-\d+shot-(dcformer|paper)\.yaml")
_BEGIN = "<!-- dcformer results: written by `dcformer card`, which replaces all up to the next such mark -->"
_END = "<!-- end of dcformer results -->"


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
    unlike: str = ""  # how it differs from what the metadata would say; if it does, it is in the text alone

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
    scores = []
    for record in in_paper_order(records):
        for metric, measured in record.metrics.items():
            scale, digits = (100, 2) if metric.startswith("acc") else (1, 4)
            value, error = measured["value"], measured.get("stderr")
            rounded = round(scale * value, digits), None if error is None else round(scale * error, digits)
            unlike = "; ".join(differences_from_published(record))
            scores.append(Score(record.task, record.num_fewshot, metric, *rounded, _details(record), unlike=unlike))
    return scores


def _details(record: Record) -> str:
    known = {**record.settings.versions, **vars(record.settings)}
    names = {"task_version": "task version", "dtype": "dtype", "oov_policy": "oov_policy"}
    names |= {"max_length": "max_length", "dcformer": "dcformer", "lm_eval": "lm_eval", "git_revision": "commit"}
    if record.num_fewshot:
        known |= {"examples": record.documents.get("examples")}
        names |= {"seed": "seed", "examples": "examples from"}
    parts = [f"{name} {known[key]}" for key, name in names.items() if known.get(key) is not None]
    return ", ".join([f"{record.num_samples} documents", *parts])


def paper_scores(row: str | None) -> list[Score]:
    """The paper's Table 4 for one of its models; nothing for any other."""
    scores = []
    for shots in PAPER_SHOTS:
        stated = published.paper_accuracies(row, shots)
        percent = {task: round(100 * stated[task], 1) for task in TABLE4_COLUMNS if task in stated}
        scores += [Score(task, shots, "acc", value, is_papers=True) for task, value in percent.items()]
    # Its sample of Flan was never published, so no data set has the name of what was measured.
    if "pile_ppl" in (perplexities := published.paper_perplexities(row)):
        scores.append(Score("pile_ppl", 0, "token_perplexity", perplexities["pile_ppl"], is_papers=True))
    return scores


def update_card(
    folder: str | os.PathLike[str],
    results: str | os.PathLike[str],
    *,
    evaluated_as: str | None = None,
    paper_row: str | None = None,
) -> list[str]:
    """
    Write the scores of `dcformer eval` into a model's card, its `model-index` and `.eval_results/*.yaml`.

    Everything else in the card and in that folder stays; scores that this function wrote before are replaced. A
    DCFormer or DCPythia without a card gets one. Results of other documents than the published ones, or of other
    windows, come into the card's text alone.

    Args:
        folder: The model's folder.
        results: The folder that `dcformer eval` wrote.
        evaluated_as (`str`, *optional*): The model's name in the results, such as its name on the Hub. By default the
            results must be of the weights in the folder, by their SHA-256.
        paper_row (`str`, *optional*): Row of the paper's Table 4 to add as the paper's, or `"none"`. By default the row
            of the model's name.

    Returns:
        Sentences on each result left out, and on what was written.

    Raises:
        OSError: if a folder is not there or holds no model.
        ValueError: if the results are of another model, or all of a part of the documents (`--limit`).
    """
    folder = Path(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    records = _records_of(folder, results, evaluated_as)
    whole = [record for record in records if not record.is_partial]
    notes = [
        f"{part.task}, {part.num_fewshot}-shot, was left out: {part.num_samples} of {part.num_documents} documents."
        for part in records
        if part.is_partial
    ]
    notes += [
        f"{record.task}, {record.num_fewshot}-shot, is in the text alone: {unlike}."
        for record in whole
        if (unlike := "; ".join(differences_from_published(record)))
    ]
    if not whole:
        raise ValueError(f"All results of {records[0].model!r} are partial (--limit); evaluate without a limit.")
    name = whole[0].model.rstrip("/")
    row = published.paper_row(name, None if paper_row is None else {name: paper_row})
    measured, from_paper = measured_scores(whole), paper_scores(row)
    stated = [*(score for score in measured if not score.unlike), *from_paper]
    path = folder / CARD_FILE
    text = path.read_text(encoding="utf-8") if path.is_file() else _new_card(folder, config)
    card = ModelCard(without_signature(text))
    others = [
        result
        for result in card.data.eval_results or []
        if (result.metric_args or {}).get("by") != MEASURED_BY and result.source_name != PAPER_NAME
    ]
    card.data.eval_results = others + [score.to_eval_result() for score in stated] or None
    card.data.model_name = (card.data.model_name or folder.resolve().name) if card.data.eval_results else None
    card.data.library_name = card.data.library_name or "transformers"
    card.text = _with_section(card.text, _section(measured, from_paper))
    write_atomically(path, str(card))
    files = _write_entries(folder / ".eval_results", stated)
    papers = f" and {len(from_paper)} figures of the paper" if from_paper else ""
    return [*notes, f"{path}: {len(measured)} measured scores{papers}; {len(files)} files in .eval_results"]


def _records_of(folder: Path, results: str | os.PathLike[str], evaluated_as: str | None) -> list[Record]:
    records = read_records(results)
    if evaluated_as is not None:
        matching = [record for record in records if record.model.rstrip("/") == evaluated_as.rstrip("/")]
    else:
        weights = model_fingerprint(os.fspath(folder))
        matching = [record for record in records if record.settings.model == weights]
    if not matching:
        others = ", ".join(sorted({repr(record.model) for record in records}))
        raise ValueError(
            f"{os.fspath(results)!r} has no results of {evaluated_as or 'these weights'}, only of {others}; evaluate "
            "this folder, or name the model by --evaluated-as if it is the same."
        )
    return matching


def _new_card(folder: Path, config: transformers.PreTrainedConfig) -> str:
    if not isinstance(config, DCFormerConfig):
        raise ValueError(
            f"{str(folder)!r} is a {config.model_type} model without {CARD_FILE}, which is written for DCFormer and "
            "DCPythia alone; write one, and the scores go into it."
        )
    with torch.device("meta"):
        parameters = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
    dtype = dtype_name(config.dtype)
    return write_card(folder.resolve().name, config, parameters=parameters, dtype=dtype)


def _section(measured: Sequence[Score], from_paper: Sequence[Score]) -> str:
    stated = {(score.task, score.num_fewshot, score.metric): score.value for score in from_paper}
    rows = []
    for score in measured:
        error = "" if score.stderr is None else f" ± {score.stderr:g}"
        theirs = stated.get((score.task, score.num_fewshot, score.metric), "")
        task, theirs = (f"{score.task} ({score.unlike})", "") if score.unlike else (score.task, theirs)
        rows.append((task, score.num_fewshot, score.metric, f"{score.value:g}{error}", theirs))
    headings = ("task", "examples", "metric", "measured ± standard error", "the paper's, Table 4")
    columns = len(headings) if stated else len(headings) - 1
    scores = table(headings[:columns], [row[:columns] for row in rows])
    source = f" The paper's figures are from {PAPER_NAME}." if stated else ""
    how = "\n".join(f"- {details}" for details in sorted({score.details for score in measured}))
    return f"## Results of dcformer eval\n\nAccuracies in percent.{source}\n\n{scores}\n\nMeasured with:\n\n{how}"


def _with_section(text: str, section: str) -> str:
    """The body of a card with our section instead of the earlier one, or at the end."""
    block = f"{_BEGIN}\n\n{section}\n\n{_END}"
    start, end = text.find(_BEGIN), text.find(_END)
    if 0 <= start < end:
        return text[:start] + block + text[end + len(_END) :]
    return f"{text.rstrip()}\n\n{block}\n"


def _write_entries(folder: Path, scores: Sequence[Score]) -> list[Path]:
    """Write a file for every task, number of examples and origin of scores."""
    groups: dict[Path, list[Score]] = {}
    for score in scores:
        if source_of(score.task).address is None:  # else the Hub has no leaderboard of it
            name = f"{score.task}-{score.num_fewshot}shot-{'paper' if score.is_papers else 'dcformer'}.yaml"
            if not _ENTRIES.fullmatch(name):
                raise ValueError(f"A task and its number of examples must make the name of a file, got {name!r}.")
            groups.setdefault(folder / name, []).append(score)
    for old in folder.glob("*shot-*.yaml"):
        if old not in groups and _ENTRIES.fullmatch(old.name):
            old.unlink()
    for file, group in groups.items():
        folder.mkdir(exist_ok=True)
        entries = eval_result_entries_to_yaml([score.to_entry() for score in group])
        write_atomically(file, yaml.safe_dump(entries, sort_keys=False, allow_unicode=True))
    return list(groups)
