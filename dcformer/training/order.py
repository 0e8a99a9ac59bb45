"""
The order in which rows are read: by the seed alone, whatever the number of processes and wherever a run stopped.

Training reads passes over the data without end, so that every optimiser step has its full batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler


class RowOrder(Sampler):
    """
    Row numbers for a run, pass after pass.

    Args:
        rows: Number of rows of the data.
        total: Number of rows that the run reads, in as many passes as that takes.
        seed: Seed of the permutations, one for each pass; `None`: rows keep their order.
    """

    def __init__(self, rows: int, total: int, seed: int | None):
        self.rows, self.total, self.seed = rows, total, seed

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self._endless(), self.total)

    def _endless(self) -> Iterator[int]:
        for number in itertools.count():
            if self.seed is None:
                yield from range(self.rows)
                continue
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            yield from torch.randperm(self.rows, generator=generator).tolist()


class EndlessStream(IterableDataset):
    """Rows of a stream, from its beginning again whenever it ends; `set_epoch` shuffles every pass anew."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in itertools.count():
            if hasattr(self.rows, "set_epoch"):
                self.rows.set_epoch(number)
            yield from self.rows  # which raises if there are none


class WholeBatches(Dataset):
    """
    Rows of an evaluation, filled up with rows without loss until they divide into batches of equal size.

    Otherwise processes would get rows twice to have as many batches as the others, and count them twice.

    Args:
        rows: Rows with `labels`.
        multiple: Rows of one batch of all processes.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], multiple: int):
        self.rows, self.length = rows, -(-len(rows) // multiple) * multiple

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number < len(self.rows):
            return self.rows[number]
        row = self.rows[0]
        return {**row, "labels": [-100] * len(row["labels"])}
