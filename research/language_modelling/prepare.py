"""Turn two collections of text, code and English prose, into the data and tokenizers of the study.

python -m research.language_modelling.prepare                                # data sets of the Hub
python -m research.language_modelling.prepare --code FOLDER --prose FOLDER   # files of your own

A document is a file of a folder, or a row of a data set. The hash of its text decides whether it is for training, for
the evaluations while training ("validation") or for the final comparison ("test").
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


DATA = Path("runs/language-modelling/data")
VOCABULARY = 2048
END = "<|endoftext|>"
# Data set of the Hub, its configuration, and the column with the text.
HUB = {
    "code": ("codeparrot/codeparrot-clean-valid", None, "content"),
    "prose": ("Salesforce/wikitext", "wikitext-103-raw-v1", "text"),
}
SUFFIXES = {"code": (".py", ".c", ".h", ".js", ".java", ".rs", ".go"), "prose": (".txt", ".md", ".rst")}
MOST_CHARACTERS = {"train": 150_000_000, "validation": 350_000, "test": 700_000}
LENGTHS = range(200, 100_000)  # of documents in characters; longer ones are generated, or tables of numbers
_TOKENIZER_DOCUMENTS = 4000


def prepare(kind: str, folder: Path | None, data: Path = DATA) -> None:
    """Write the splits and the tokenizer of a kind of text, unless they are there."""
    target = data / kind
    if (target / "tokenizer").is_dir():
        print(f"{kind}: {target} is there; move it to prepare other text")
        return
    splits = divide(read_hub(kind) if folder is None else read_folder(folder, SUFFIXES[kind]), MOST_CHARACTERS)
    target.mkdir(parents=True, exist_ok=True)
    for name, texts in splits.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (target / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{kind}, {name}: {len(texts):,} documents, {sum(map(len, texts)):,} characters")
    train_tokenizer(splits["train"], VOCABULARY).save_pretrained(target / "tokenizer")


def divide(texts: Iterable[str], most_characters: Mapping[str, int]) -> dict[str, list[str]]:
    """
    Divide texts by their hashes into "train", "validation" and "test", each text once, in the order of the hashes.

    Args:
        texts: Read until there is enough for training; those shorter or longer than `LENGTHS` are left out.
        most_characters: Split -> the most characters of it.

    Raises:
        ValueError: if a split is empty.
    """
    splits: dict[str, list[tuple[str, str]]] = {name: [] for name in most_characters}
    seen: set[str] = set()
    training_characters = 0
    for text in texts:
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest in seen or len(text) not in LENGTHS:
            continue
        seen.add(digest)
        split = {0: "validation", 1: "test"}.get(int(digest[:8], 16) % 20, "train")
        splits[split].append((digest, text))
        training_characters += len(text) if split == "train" else 0
        if training_characters >= most_characters["train"]:
            break
    chosen = {}
    for name, documents in splits.items():
        documents.sort()  # by their digests: those that a limit leaves out are from everywhere
        ends = itertools.accumulate(len(text) for _, text in documents)
        chosen[name] = [text for (_, text), end in zip(documents, ends) if end <= most_characters[name]]
        if not chosen[name]:
            raise ValueError(
                f"There are too few documents of {LENGTHS.start:,} to {LENGTHS.stop:,} characters: of {len(seen):,} "
                f"none is for {name}. In a folder, documents are the files with the suffixes {SUFFIXES}."
            )
    return chosen


def read_folder(folder: Path, suffixes: tuple[str, ...], key: Callable[[Path], Any] | None = None) -> Iterator[str]:
    """The files of a folder and those below it, in the order of their names, or of `key`."""
    if not folder.is_dir():
        raise NotADirectoryError(f"There is no folder {str(folder)!r}.")
    for file in sorted(folder.rglob("*"), key=key):
        if file.suffix in suffixes and file.is_file():
            yield file.read_text(encoding="utf-8", errors="replace")


def read_hub(kind: str) -> Iterator[str]:
    """The documents of a data set; WikiText has a row per paragraph, and a title begins an article."""
    from datasets import load_dataset  # not needed for files of one's own

    name, configuration, column = HUB[kind]
    article = ""
    for row in load_dataset(name, configuration, split="train", streaming=True):
        is_title = kind == "code" or (row[column].startswith(" = ") and not row[column].startswith(" = = "))
        if is_title and article:
            yield article
            article = ""
        article += row[column]
    yield article


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of the first texts, with so many tokens; every digit is a token."""
    tokenizer, bytes_alone = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_alone])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(itertools.islice(texts, _TOKENIZER_DOCUMENTS), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind, (name, *_) in HUB.items():
        parser.add_argument(f"--{kind}", type=Path, metavar="FOLDER", help=f"files of your own (default: {name})")
    arguments = parser.parse_args()
    for kind in HUB:
        prepare(kind, getattr(arguments, kind))


if __name__ == "__main__":
    main()
