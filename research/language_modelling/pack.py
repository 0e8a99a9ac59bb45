"""Pack the text of the recipe `gpu` as compressed tokens, which need no other package to be read.

python -m research.language_modelling.pack --code FOLDER        # .c and .h files, and those of other languages

`<output>/<text>/` holds train.xz, validation.xz and test.xz (16-bit little-endian tokens, an end token after every
document), the tokenizer, and manifest.json with sizes and hashes. Files are read in the order of the hashes of their
names, so that a limit leaves out a little of everything, and divided as `prepare` divides them.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dcformer.common.files import find_damage, make_manifest, read_sealed, seal, write_atomically

from .prepare import END, SUFFIXES, divide, read_folder, train_tokenizer


DATA = Path("runs/language-modelling/gpu")
MANIFEST = "manifest.json"
VOCABULARY = 8192
CHARACTERS = 240_000_000  # of the training text: about 100 million tokens of C in 38 MiB
_HELD_OUT = {"validation": 1_500_000, "test": 3_000_000}
_DOCUMENTS_AT_ONCE = 500


def pack(folder: Path, text: str, characters: int = CHARACTERS, data: Path = DATA) -> Path:
    """
    Write the tokens and the tokenizer of a folder of text, unless they are there and whole.

    Args:
        folder: The text, in files of the suffixes that `SUFFIXES` has for it.
        text: `"code"` or `"prose"`.
        characters: The most characters of the training text.
        data: The folder to write a folder of that name in.

    Raises:
        NotADirectoryError: if there is no such folder of text.
        ValueError: if it has too few documents, or what is there is damaged.
    """
    target = data / text
    if (target / MANIFEST).is_file():
        there = check(target)["characters"]
        if there != characters:
            raise ValueError(
                f"{str(target)!r} was packed with {there:,} characters, not {characters:,}; remove it first."
            )
        print(f"{text}: {target} is there; remove it to pack other text")
        return target

    def scattered(file: Path) -> str:
        return hashlib.sha256(file.relative_to(folder).as_posix().encode()).hexdigest()

    texts = read_folder(folder, SUFFIXES[text], scattered)
    splits = divide(texts, {"train": characters, **_HELD_OUT})
    tokenizer = train_tokenizer(splits["train"], VOCABULARY)
    tokenizer.save_pretrained(target / "tokenizer")
    tokens = {}
    for name, documents in splits.items():
        array = np.fromiter(_encode(documents, tokenizer), dtype="<u2")
        tokens[name] = len(array)
        write_atomically(target / f"{name}.xz", lzma.compress(array.tobytes()))
        print(f"{text}, {name}: {len(documents):,} documents, {len(array):,} tokens", flush=True)
    values = {"characters": characters, "vocabulary": len(tokenizer), "tokens": tokens, "files": make_manifest(target)}
    write_atomically(target / MANIFEST, seal(values))
    return target


def check(folder: Path) -> dict[str, Any]:
    """The manifest of a packed text; FileNotFoundError if there is none, ValueError if a file of it is damaged."""
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"{str(folder)!r} has no packed text; run python -m research.language_modelling.pack.")
    manifest = read_sealed(folder / MANIFEST)
    if (damage := find_damage(folder, manifest["files"])) is not None:
        raise ValueError(f"{damage} Remove {str(folder)!r} and pack the text again.")
    return manifest


def _encode(documents: list[str], tokenizer) -> Iterable[int]:
    end = tokenizer.convert_tokens_to_ids(END)
    for start in range(0, len(documents), _DOCUMENTS_AT_ONCE):
        batch = documents[start : start + _DOCUMENTS_AT_ONCE]
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(batch):  # which makes no offsets
            yield from encoding.ids
            yield end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for text in SUFFIXES:
        parser.add_argument(f"--{text}", type=Path, metavar="FOLDER", help=f"folder with the {text}")
    parser.add_argument("--characters", type=int, default=CHARACTERS, help="most characters of the training text")
    parser.add_argument("--output", type=Path, default=DATA, help=f"folder to write in (default: {DATA})")
    arguments = parser.parse_args()
    for text in SUFFIXES:
        if (folder := getattr(arguments, text)) is not None:
            target = pack(folder, text, arguments.characters, arguments.output)
            size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
            print(f"{text}: {size / 2**20:.1f} MiB in {target}")


if __name__ == "__main__":
    main()
