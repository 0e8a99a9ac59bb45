"""Writing measured scores into the card of a folder, as often as one likes, beside what its owner wrote there."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard, eval_result_entries_to_yaml
from yaml import YAMLError

from ..common.files import write_atomically
from ..common.yaml_text import write_yaml
from ..conversion.formats.transformers_folder import open_weights
from ..conversion.pieces import dtype_name
from ..eval import published
from ..eval.provenance import Model, model_fingerprint
from ..eval.records import Record, model_folder, read_records
from ..model_card import CARD_FILE, table, without_signature, write_card
from .scores import PAPER_NAME, Score, is_ours, measured_scores, paper_scores


RESULTS_FOLDER = ".eval_results"
_ENTRIES = re.compile(r"\w+-\d+shot-(dcformer|paper)\.yaml")
_BEGIN = "<!-- dcformer results: written by `dcformer card`, which replaces all up to the next such mark -->"
_END = "<!-- end of dcformer results -->"


@dataclass
class UpdatedCard:
    """
    Attributes:
        card (`Path`): The card.
        measured (`int`), from_paper (`int`): How many scores of each kind it has now.
        files (`list[Path]`): What was written into `.eval_results`.
        left_out (`list[str]`): Sentences on results that were not taken.
    """

    card: Path
    measured: int
    from_paper: int
    files: list[Path]
    left_out: list[str]


def update_card(
    folder: str | os.PathLike,
    results: str | os.PathLike,
    *,
    evaluated_as: str | None = None,
    paper_row: str | None = None,
) -> UpdatedCard:
    """
    Write the scores of `dcformer eval` into a model's card, its `model-index` and `.eval_results/*.yaml`.

    Whatever else the card and that folder hold stays; scores that this function wrote before are replaced. A folder
    without a card gets one.

    Args:
        folder: The model's folder.
        results: The folder that `dcformer eval` wrote.
        evaluated_as (`str`, *optional*): The model's name in the results, if it was evaluated elsewhere, such as on the
            Hub. None: the results must be of the weights in the folder, by their SHA-256.
        paper_row (`str`, *optional*): Row of the paper's Table 4 whose figures are added as the paper's; `"none"` for
            no row. None: the row that the model's name says.

    Raises:
        FileNotFoundError: if a folder is not there, holds no model, or no results.
        ValueError: if the results are of another model or all partial, or the metadata of the card cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"There is no folder {str(folder)!r}; give the folder of the model (of a model on the "
            "Hub: of your clone of its repository)."
        )
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{str(folder)!r} holds no config.json; give the folder of a model.")
    records = _records_of(folder, results, evaluated_as)
    whole = [record for record in records if not record.is_partial]
    left_out = [
        f"{record.task}, {record.num_fewshot}-shot, was left out: {record.num_samples} of {record.num_documents} "
        "documents are no result to publish."
        for record in records
        if record.is_partial
    ]
    if not whole:
        raise ValueError(
            f"All results of {records[0].model!r} in {str(results)!r} are of a part of the documents (--limit); "
            "evaluate without a limit."
        )
    name = whole[0].model.rstrip("/")
    row = published.paper_row(name, None if paper_row is None else {name: paper_row})
    measured, from_paper = measured_scores(whole), paper_scores(row)
    card = _write_card(folder, measured, from_paper)
    files = _write_entries(folder / RESULTS_FOLDER, [*measured, *from_paper])
    return UpdatedCard(card, len(measured), len(from_paper), files, left_out)


def _records_of(folder: Path, results: str | os.PathLike, evaluated_as: str | None) -> list[Record]:
    records = read_records(results)
    others = ", ".join(sorted({repr(record.model) for record in records}))
    if evaluated_as is not None:
        found = [record for record in records if model_folder(record.model) == model_folder(evaluated_as)]
        if not found:
            raise ValueError(f"{str(results)!r} holds no results of {evaluated_as!r}; there are of {others}.")
        return found
    weights = model_fingerprint(Model(str(folder), None, None))
    found = [record for record in records if record.settings.get("model") == weights]
    if not found:
        raise ValueError(
            f"The results in {str(results)!r} are of {others}, evaluated with other weights or another config.json "
            f"than those in {str(folder)!r}; evaluate this folder, or name the model by --evaluated-as if it is the "
            "same."
        )
    return found


def _write_card(folder: Path, measured: Sequence[Score], from_paper: Sequence[Score]) -> Path:
    path = folder / CARD_FILE
    text = path.read_text(encoding="utf-8") if path.is_file() else _new_card(folder)
    try:
        card = ModelCard(without_signature(text), ignore_metadata_errors=False)
    except (ValueError, YAMLError) as error:
        raise ValueError(
            f"The metadata at the top of {str(path)!r} cannot be read ({' '.join(str(error).split())[:200]}); correct "
            "them first."
        ) from error
    ours = [score.to_eval_result() for score in (*measured, *from_paper)]
    # Those of an earlier run go, since the weights may be others now.
    card.data.eval_results = [result for result in card.data.eval_results or [] if not is_ours(result)] + ours
    card.data.model_name = card.data.model_name or folder.resolve().name
    card.data.library_name = card.data.library_name or "transformers"
    card.text = _with_section(card.text, _section(measured, from_paper))
    write_atomically(path, str(card))
    return path


def _section(measured: Sequence[Score], from_paper: Sequence[Score]) -> str:
    stated = {(score.task, score.num_fewshot, score.metric): score.value for score in from_paper}
    rows = []
    for score in measured:
        error = "" if score.stderr is None else f" ± {score.stderr:g}"
        theirs = stated.get((score.task, score.num_fewshot, score.metric), "")
        rows.append((score.task, score.num_fewshot, score.metric, f"{score.value:g}{error}", theirs))
    headings = ("task", "examples", "metric", "measured ± standard error", "the paper's, Table 4")
    lines = "Accuracies in percent. " + (f"The paper's figures are from {PAPER_NAME}." if stated else "")
    if not stated:
        headings, rows = headings[:-1], [row[:-1] for row in rows]
    details = sorted({score.details for score in measured})
    how = "\n".join(f"- {line}" for line in details)
    return f"## Results of dcformer eval\n\n{lines.strip()}\n\n{table(headings, rows)}\n\nMeasured with:\n\n{how}"


def _with_section(text: str, section: str) -> str:
    """The body of a card with our section in its place, or at the end."""
    block = f"{_BEGIN}\n\n{section}\n\n{_END}"
    start, end = text.find(_BEGIN), text.find(_END)
    if 0 <= start < end:
        return text[:start] + block + text[end + len(_END) :]
    return f"{text.rstrip()}\n\n{block}\n"


def _new_card(folder: Path) -> str:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    leaves = open_weights(folder).values()
    ((dtype, _),) = Counter(dtype_name(leaf.dtype) for leaf in leaves).most_common(1)
    return write_card(
        folder.resolve().name,
        config,
        class_name=(config.architectures or [""])[0],
        parameters=sum(math.prod(leaf.shape) for leaf in leaves),
        dtype=dtype,
    )


def _write_entries(folder: Path, scores: Iterable[Score]) -> list[Path]:
    """A file for every task, number of examples and origin; those of data sets outside the Hub have no place there."""
    groups: dict[str, list[Score]] = {}
    for score in scores:
        if score.is_on_hub:
            whose = "paper" if score.is_papers else "dcformer"
            groups.setdefault(f"{score.task}-{score.num_fewshot}shot-{whose}.yaml", []).append(score)
    for old in folder.glob("*shot-*.yaml"):
        if old.name not in groups and _ENTRIES.fullmatch(old.name):
            old.unlink()
    if groups:
        folder.mkdir(exist_ok=True)
    files = []
    for name, group in groups.items():
        text = write_yaml(eval_result_entries_to_yaml([score.to_entry() for score in group]))
        write_atomically(folder / name, text)
        files.append(folder / name)
    return files
