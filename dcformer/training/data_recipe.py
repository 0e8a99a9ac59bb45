"""The `data:` mapping of a recipe: where documents come from and how they become rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..common.quoting import quoted
from ..common.renamed import refuse_old_name
from ..head_tasks.practice import FORMS
from .fields import check_keys, check_mapping, check_range, read_fields


HEAD_TASKS = "head_tasks"  # the source that is generated, and its tokenizer
_LONGEST_ROW = 2**24
_SHORTEST_OF_STAGES = 5  # of words that recur
_MOST_DOCUMENTS = 10**18
_MOST_GENERATED = 10**7  # all are made in memory before the first step
_MOST_LINES = 1000
_MOST_WORDS = 1000


@dataclass(frozen=True)
class DataRecipe:
    """
    Where documents come from and how they become rows: the `data` mapping of a recipe.

    Args:
        source (`str`): `"head_tasks"` for generated head tasks; a file (.jsonl, .json, .txt with a
            document per line, .parquet, .csv), a folder of such files or of `Dataset.save_to_disk`; or a data set on
            the Hub.
        configuration (`str`, *optional*): Configuration of a data set on the Hub.
        split (`str`, defaults to `"train"`): Split, also in the form `"train[:90%]"`. A file has `"train"` only.
        text_column (`str`, defaults to `"text"`): Column that holds the documents.
        streaming (`bool`, defaults to `False`): Read and pack while training, in an order shuffled within a buffer of
            10,000 documents; otherwise all rows are packed first, into the cache of `datasets`.
        sequence_length (`int`, defaults to 2048): Tokens of a row, at least 2.
        packing (`str`, defaults to `"split"`): `"split"` fills rows and continues a document in the next row, as a
            sequence of its own; `"whole"` puts every document where it fits in one piece and pads the rest of rows;
            `"none"` gives every document a row. Documents longer than a row are cut in any case.
        loss_on (`str`, defaults to `"all"`): `"all"` tokens, or those that lie in the character spans of the column
            `answers` (`"answers"`).
        documents (`int`, *optional*): How many documents of head tasks to generate; otherwise the most to take, from
            the start of the source.
        lines (`list[int]`, *optional*): Least and most examples in a document of head tasks, `[1, 8]` if not given.
        stages (`list[dict]`, *optional*): Head tasks in stages that are trained on one after the other, in this order,
            instead of `documents` of examples alone. A stage has `documents`, their number; the share of each form
            among them, of those that `dcformer.head_tasks.practice` describes (`examples`, `questions`,
            `recurring_facts`, `recurring_words`); and optionally `lines` for its examples instead of those of the
            recipe, `words`, how many different words may recur, and `facts`, how many facts the questions are about.
            No document is longer than a row.
        evaluation (`DataRecipe`, *optional*): What the evaluation loss is measured on, in the given order.

    Source: section 4.1 of the paper for the context length; packing is ours.
    """

    source: str
    configuration: str | None = None
    split: str = "train"
    text_column: str = "text"
    streaming: bool = False
    sequence_length: int = 2048
    packing: Literal["split", "whole", "none"] = "split"
    loss_on: Literal["all", "answers"] = "all"
    documents: int | None = None
    lines: list | None = None
    stages: list | None = None
    evaluation: DataRecipe | None = None

    @classmethod
    def from_mapping(cls, mapping: Mapping, name: str = "data") -> DataRecipe:
        """
        The recipe that a mapping describes. Keys that `evaluation` lacks are those of the training data, but for the
        split of head tasks, which is `"validation"`.

        Args:
            mapping (`Mapping`): Keys are the fields above.
            name (`str`, defaults to `"data"`): What errors call the mapping.

        Raises:
            ValueError: for an unknown key, a value of another type or one that is not allowed; if `source` is missing;
                if the evaluation would read the training data.
        """
        check_mapping(mapping, name)
        values = {key: value for key, value in mapping.items() if key != "evaluation"}
        recipe = read_fields(cls, values, name)
        recipe._check_values(name)
        evaluation = mapping.get("evaluation")
        if evaluation is None:
            return recipe
        if not isinstance(evaluation, Mapping):
            raise ValueError(f"{name}.evaluation must be a mapping or null, got {quoted(evaluation)}.")
        if evaluation.get("evaluation") is not None:
            raise ValueError(
                f"{name}.evaluation.evaluation must be left out, got {quoted(evaluation['evaluation'])}; an evaluation "
                "has none of its own."
            )
        if evaluation.get("source", recipe.source) == HEAD_TASKS:
            values = {**values, "split": "validation"}
        else:
            values = {key: value for key, value in values.items() if key != "lines"}
        values.pop("stages", None)
        evaluation_recipe = cls.from_mapping({**values, **evaluation}, f"{name}.evaluation")
        if evaluation_recipe._origin == recipe._origin:
            raise ValueError(
                f"{name}.evaluation would read the training data, {recipe.source!r}, split {recipe.split!r}; give it "
                "another source or split."
            )
        return replace(recipe, evaluation=evaluation_recipe)

    @property
    def _origin(self) -> tuple:
        return self.source, self.configuration, self.split

    def _check_values(self, name: str) -> None:
        refuse_old_name(f"{name}.source", self.source)
        if not self.source:
            raise ValueError(f"{name}.source must not be empty; give a file, a folder, a data set or {HEAD_TASKS!r}.")
        shortest = 2 if self.stages is None else _SHORTEST_OF_STAGES
        check_range(f"{name}.sequence_length", self.sequence_length, shortest, _LONGEST_ROW)
        if self.documents is not None:
            most = _MOST_GENERATED if self.source == HEAD_TASKS else _MOST_DOCUMENTS
            check_range(f"{name}.documents", self.documents, 1, most)
        if self.lines is not None:
            if self.source != HEAD_TASKS:
                raise ValueError(
                    f"{name}.lines is for source {HEAD_TASKS!r} alone, got {quoted(self.lines)}; set it null."
                )
            _check_lines(f"{name}.lines", self.lines)
        if self.stages is not None:
            self._check_stages(f"{name}.stages")
        elif self.source == HEAD_TASKS and self.documents is None:
            raise ValueError(f"{name}.documents is missing; say how many documents of {HEAD_TASKS} to generate.")

    def _check_stages(self, name: str) -> None:
        if self.source != HEAD_TASKS or self.streaming or self.documents is not None:
            raise ValueError(f"{name} is for source {HEAD_TASKS!r} without streaming and documents; set it null.")
        if not self.stages:
            raise ValueError(f"{name} must not be empty, got {quoted(self.stages)}.")
        for place, stage in enumerate(self.stages):
            check_mapping(stage, f"{name}[{place}]")
            check_keys(stage, ("documents", "lines", "words", "facts", *FORMS), f"{name}[{place}]")
            for key in ("documents", "words", "facts"):
                if stage.get(key) is not None and type(stage[key]) is not int:
                    raise ValueError(f"{name}[{place}].{key} must be an integer, got {quoted(stage[key])}.")
            check_range(f"{name}[{place}].documents", stage.get("documents", 0), 1, _MOST_GENERATED)
            if stage.get("lines") is not None:
                _check_lines(f"{name}[{place}].lines", stage["lines"])
            if stage.get("words") is not None:
                check_range(f"{name}[{place}].words", stage["words"], 2, _MOST_WORDS)
            if stage.get("facts") is not None:
                check_range(f"{name}[{place}].facts", stage["facts"], 1, 3)
            shares = [stage[form] for form in FORMS if form in stage]
            if not all(type(share) in (int, float) and 0 <= share < math.inf for share in shares) or not sum(shares):
                raise ValueError(
                    f"{name}[{place}] must give some of {', '.join(FORMS)} a positive share, got {quoted(stage)}."
                )


def _check_lines(name: str, lines: Any) -> None:
    is_pair = isinstance(lines, list) and [type(number) for number in lines] == [int, int]
    if not is_pair or not 1 <= lines[0] <= lines[1]:
        raise ValueError(f"{name} must be [least, most] such as [1, 8], got {quoted(lines)}.")
    check_range(name, lines[1], 1, _MOST_LINES)
