"""The head-composition tasks as a data set of the `datasets` library: generated once and cached, or streamed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..optional import import_optional
from . import composition
from .composition import SPLITS, iterate_documents


datasets = import_optional(
    "datasets", 'The data set of composition tasks needs datasets: pip install "dcformer[train]".'
)


@dataclass
class CompositionConfig(datasets.BuilderConfig):
    """
    What is generated.

    Args:
        seed (`int`, defaults to 0): Of all splits.
        train, validation, test (`int`, defaults to 100,000, 1,000 and 1,000): Documents of each split; a split of 0 is
            left out.
        lines (`tuple[int, int]`, defaults to (1, 8)): Least and most examples in a document.
    """

    seed: int = 0
    train: int = 100_000
    validation: int = 1_000
    test: int = 1_000
    lines: tuple[int, int] = (1, 8)


class CompositionTasks(datasets.GeneratorBasedBuilder):
    """
    `CompositionTasks(seed=1, train=5_000)`, then `download_and_prepare()` and `as_dataset()`, or
    `as_streaming_dataset()`, which writes nothing.

    Rows are those of [`dcformer.tasks.composition_documents`]: `text`, `task`, `pattern`, `transformation` and
    `answers`. Nothing is downloaded.

    Args:
        cache_dir (*optional*): Where the data set is written; by default in the cache of `datasets`.
        arguments: Fields of [`CompositionConfig`], and what else `datasets.DatasetBuilder` takes.

    Raises:
        ValueError: if a field has an impossible value.
    """

    VERSION = datasets.Version("1.0.0")
    BUILDER_CONFIG_CLASS = CompositionConfig

    def __init__(self, cache_dir: str | None = None, **arguments: Any):
        # Part of the cache's path: another generator does not find the data of this one.
        super().__init__(cache_dir, **{"dataset_name": "composition_tasks", "hash": _generator_digest(), **arguments})
        for split in SPLITS:
            if getattr(self.config, split) < 0:
                raise ValueError(f"{split} must be a number of documents, got {getattr(self.config, split)!r}.")
        if not any(getattr(self.config, split) for split in SPLITS):
            raise ValueError("All splits have 0 documents; give at least one of train, validation and test.")

    def _info(self) -> datasets.DatasetInfo:
        text = datasets.Value("string")
        span = datasets.Sequence(datasets.Value("int32"), length=2)
        return datasets.DatasetInfo(
            description="Head-composition tasks of section 4.3 of Dynamically Composable Multi-Head Attention.",
            features=datasets.Features(
                {
                    "text": text,
                    "task": text,
                    "pattern": text,
                    "transformation": text,
                    "answers": datasets.Sequence(span),
                }
            ),
        )

    def _split_generators(self, dl_manager) -> list[datasets.SplitGenerator]:
        return [
            datasets.SplitGenerator(name=split, gen_kwargs={"split": split})
            for split in SPLITS
            if getattr(self.config, split)
        ]

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        count, lines = getattr(self.config, split), tuple(self.config.lines)
        yield from enumerate(iterate_documents(count, self.config.seed, split, lines))


def _generator_digest() -> str:
    """Of the code and the words that documents are made of."""
    folder = Path(composition.__file__).parent
    files = (folder / name for name in ("composition.py", "vocabulary.json", "authors_lines.bin"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
