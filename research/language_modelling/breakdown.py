"""The loss of a language model on test text by the position of a token and by the kind of word it is in."""

from __future__ import annotations

import collections
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

import dcformer  # noqa: F401  registers the models


LENGTH = 256  # tokens of a part of a document, as in training
FREQUENT_WORDS = 100
POSITIONS = (4, 16, 64, 256)  # ends of ranges; the first token of a part is not predicted
CLASSES = ("frequent word", "repeated word", "new word", "number", "punctuation", "white space")
_PIECES = re.compile(r"(?P<word>[^\W\d]\w*)|(?P<number>\d+)|(?P<white_space>\s+)|(?P<punctuation>.)", re.DOTALL)
_BATCH = 32


def breakdown(model_folder: Path, data: Path) -> dict[str, Any]:
    """
    Score a model on the test text of the study.

    Args:
        model_folder: Model and tokenizer.
        data: Folder with `test.jsonl`, and `validation.jsonl`, whose most frequent words are the frequent ones.

    Returns:
        `loss` in nats per token; `tokens`; `bits_per_character`; `classes` and `positions`, each name -> [tokens, sum
        of their losses]. A repeated word, other than a frequent one, has occurred before in the same part; a part is
        256 tokens of a document. A token of several words counts with the last one.
    """
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    texts, frequent = texts_of(data / "test.jsonl"), frequent_words(texts_of(data / "validation.jsonl"))
    parts = [part for text in texts for part in classified_parts(text, tokenizer, frequent)]
    parts.sort(key=len)
    classes, positions = ({} for _ in range(2))
    for start in range(0, len(parts), _BATCH):
        batch = parts[start : start + _BATCH]
        input_ids = pad_sequence([torch.tensor([token for token, _ in part]) for part in batch], batch_first=True)
        for part, row in zip(batch, token_losses(model, input_ids).tolist()):
            for position, ((_, kind), loss) in enumerate(zip(part[1:], row), start=1):
                end = next(end for end in POSITIONS if position < end)
                for sums, name in ((classes, kind), (positions, f"below {end}")):
                    tokens, total = sums.get(name, (0, 0.0))
                    sums[name] = tokens + 1, total + loss
    tokens, total = (sum(values) for values in zip(*classes.values()))
    bits = total / sum(map(len, texts)) / math.log(2)
    return {
        "loss": total / tokens,
        "tokens": tokens,
        "bits_per_character": bits,
        "classes": {name: classes[name] for name in CLASSES if name in classes},
        "positions": {name: positions[name] for name in (f"below {end}" for end in POSITIONS) if name in positions},
    }


@torch.no_grad()
def token_losses(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Loss in nats of every token but the first of each row, on the CPU: (rows, tokens - 1)."""
    input_ids = input_ids.to(model.device)
    logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]  # (rows, tokens, vocabulary)
    return cross_entropy(logits.transpose(1, 2).float(), input_ids[:, 1:], reduction="none").cpu()


def classified_parts(text: str, tokenizer, frequent: frozenset[str]) -> Iterator[list[tuple[int, str]]]:
    """The parts of a document, each its tokens as (id, name of its class)."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pieces = list(_PIECES.finditer(text))
    owners = [place for place, piece in enumerate(pieces) for _ in range(len(piece[0]))]  # character -> piece
    for start in range(0, len(encoding.input_ids), LENGTH):
        kinds: dict[int, str] = {}  # piece -> its class, which all of its tokens share
        words: set[str] = set()
        part = []
        stop = start + LENGTH
        for token, (_, end) in zip(encoding.input_ids[start:stop], encoding.offset_mapping[start:stop]):
            place = owners[end - 1]
            if place not in kinds:
                word, kind = pieces[place][0], str(pieces[place].lastgroup).replace("_", " ")
                if kind == "word":
                    kind = "frequent word" if word in frequent else "repeated word" if word in words else "new word"
                    words.add(word)
                kinds[place] = kind
            part.append((token, kinds[place]))
        yield part


def frequent_words(texts: Iterable[str]) -> frozenset[str]:
    """The most frequent words of these documents."""
    counts = collections.Counter(
        piece[0] for text in texts for piece in _PIECES.finditer(text) if piece.lastgroup == "word"
    )
    return frozenset(word for word, _ in counts.most_common(FREQUENT_WORDS))


def texts_of(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
