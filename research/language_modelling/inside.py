"""The heads that look at what is copied, before composition and after it, and the loss without a branch or a head.

python -m research.language_modelling.inside            # the bundled model on NumPy's C headers; some minutes
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy
import pandas as pd
import torch
from torch import Tensor

from dcformer.analysis import ablated, watch
from dcformer.analysis.branches import branches_of, compose_layers
from dcformer.common.plotting import draw_grid, picture
from dcformer.loading import load_model

from .breakdown import LENGTH, classified_parts, frequent_words, token_losses


KINDS = ("repeated word", "new word")
MAPS = {"weights": "before composition", "composed_weights": "after composition"}
_BATCH = 16

Part = list[tuple[int, str]]  # tokens with their classes


def whole_parts(texts: Sequence[str], tokenizer: Any, count: int) -> list[Part]:
    """Parts of full length, at most `count`, spread evenly over the texts."""
    frequent = frequent_words(texts)
    parts = [part for text in texts for part in classified_parts(text, tokenizer, frequent) if len(part) == LENGTH]
    return [parts[place] for place in sorted({int(place) for place in numpy.linspace(0, len(parts) - 1, count)})]


def ids_of(parts: Sequence[Part]) -> Tensor:
    return torch.tensor([[token for token, _ in part] for part in parts])  # (parts, LENGTH)


def of_kind(parts: Sequence[Part], kind: str) -> Tensor:
    """A mask of the tokens of a class, without the first of each part: (parts, LENGTH - 1)."""
    return torch.tensor([[each == kind for _, each in part[1:]] for part in parts])


@torch.no_grad()
def attention_on_copied(model: Any, parts: Sequence[Part]) -> pd.DataFrame:
    """
    Measure the attention of each head on earlier occurrences of the token that comes next.

    Returns:
        The columns layer, head, map, and `attention`, the sum over those keys, its mean over all tokens of repeated
        words that the part has had before. After composition it may be negative or above one.
    """
    sums: dict[tuple[int, str], Tensor] = collections.defaultdict(lambda: torch.zeros(()))
    seen, count = torch.empty(()), 0

    def add(layer: int, name: str, value: Tensor) -> None:
        sums[layer, name] = sums[layer, name] + (value[:, :, :-1] * seen[:, None]).sum((0, 2, 3))  # (heads,)

    with watch(model, add, tuple(MAPS)):
        for start in range(0, len(parts), _BATCH):
            batch = parts[start : start + _BATCH]
            ids = ids_of(batch)
            # A query's next token is that of the key: (parts, queries, keys).
            seen = (ids[:, 1:, None] == ids[:, None, :]).tril()
            seen = seen & of_kind(batch, KINDS[0])[:, :, None]
            count += int(seen.any(-1).sum())
            model(input_ids=ids, use_cache=False)
    rows = [
        (layer, head, name, float(value) / count)
        for (layer, name), total in sums.items()
        for head, value in enumerate(total)
    ]
    return pd.DataFrame(rows, columns=["layer", "head", "map", "attention"])


def losses_of(model: Any, parts: Sequence[Part]) -> Tensor:
    """Loss in nats of every token but the first of each part: (parts, LENGTH - 1)."""
    return torch.cat([token_losses(model, ids) for ids in ids_of(parts).split(_BATCH)])


def without_share_of(model: Any, layer: int, head: int) -> AbstractContextManager:
    """Within the block this head of this layer takes its own weights, not the composed ones."""
    own: list[Tensor] = []

    def replace(_: int, name: str, value: Tensor) -> Tensor | None:
        if name == "weights":
            own[:] = [value]
            return None
        value = value.clone()
        value[:, head] = own[0][:, head]
        return value

    return watch(model, replace, tuple(MAPS), layer)


def rises(model: Any, parts: Sequence[Part]) -> pd.DataFrame:
    """
    Measure how the loss on repeated and new words rises without a branch, or with a head as if not composed.

    Returns:
        The columns layer, without, class, rise in nats per token, and its standard error over parts.
    """
    modules = compose_layers(model)
    cases: list[tuple[int, str, AbstractContextManager]] = []
    for layer, module in enumerate(modules):
        cases += [(layer, name, ablated(model, layer, name)) for name in ("all", *branches_of(module))]
        cases += [
            (layer, f"head {head}", without_share_of(model, layer, head))
            for head in range(model.config.num_attention_heads)
        ]
    before = losses_of(model, parts)
    masks = {kind: of_kind(parts, kind) for kind in KINDS}
    rows = []
    for layer, name, case in cases:
        with case:
            difference = losses_of(model, parts) - before
        for kind, mask in masks.items():
            total, tokens = (difference * mask).sum(1).double(), mask.sum(1)  # (parts,)
            rise = total.sum() / tokens.sum()
            error = (total - rise * tokens).square().sum().sqrt() / tokens.sum()  # of a ratio of sums
            rows.append((layer, name, kind, float(rise), float(error)))
    return pd.DataFrame(rows, columns=["layer", "without", "class", "rise", "standard_error"])


def draw(attention: pd.DataFrame, losses: pd.DataFrame, file: Path) -> None:
    """Attention of every head on what is copied, and the rises without a branch of a layer, or without all."""
    cases = [name for name in losses["without"].unique() if not name.startswith("head")]
    layers, heads = losses.layer.max() + 1, attention["head"].max() + 1
    with picture(file, (10, 4), "analysis") as figure:
        left, right = figure.subplots(1, 2)
        for (name, title), (colour, marker) in zip(MAPS.items(), (("0.6", "o"), ("0.1", "s"))):
            rows = attention[attention["map"] == name]
            left.plot(rows.layer * (heads + 1) + rows["head"], rows.attention, marker, color=colour, label=title)
        left.axhline(0, color="0.4", linewidth=0.8)
        left.set_xticks([layer * (heads + 1) + (heads - 1) / 2 for layer in range(layers)], range(layers))
        left.set(xlabel=f"Layer, its {heads} heads side by side", ylabel="Sum of the weights")
        left.set_title("Attention on what the next token repeats", fontsize=10)
        for place, (kind, colour, hatch) in enumerate(zip(KINDS, ("#0072B2", "#E69F00"), ("", "//"))):
            rows = losses[(losses["class"] == kind) & losses["without"].isin(cases)]
            starts = rows.layer * (len(cases) + 1) + rows["without"].map(cases.index) + 0.4 * place
            look = {"color": colour, "hatch": hatch, "edgecolor": "white", "label": f"{kind}s"}
            right.bar(starts, rows.rise, 0.4, yerr=1.96 * rows.standard_error, error_kw={"linewidth": 0.7}, **look)
        places = [(layer, case) for layer in range(layers) for case in range(len(cases))]
        right.set_xticks(
            [layer * (len(cases) + 1) + case + 0.2 for layer, case in places],
            [f"layer {layer}, {cases[case].replace('_', ' ')}" for layer, case in places],
            rotation=90,
            fontsize=6,
        )
        right.set_ylabel("Nats per token")
        right.set_title("Rise of the loss without a branch", fontsize=10)
        for axis in (left, right):
            draw_grid(axis, "y")
            axis.legend(frameon=False, fontsize=8, loc="upper left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dcformer-tiny", help="a bundled model, a folder, or a name on the Hub")
    parser.add_argument("--text", type=Path, default=Path(numpy.get_include()), help="folder with .h files")
    parser.add_argument("--parts", type=int, default=128, help="parts of 256 tokens to read")
    parser.add_argument("--output", type=Path, default=Path("inside"), help="folder for tables and the picture")
    arguments = parser.parse_args()
    loaded = load_model(arguments.model, device="cpu", dtype="float32")
    texts = [file.read_text(encoding="utf-8") for file in sorted(arguments.text.rglob("*.h"))]
    parts = whole_parts(texts, loaded.tokenizer, arguments.parts)
    arguments.output.mkdir(parents=True, exist_ok=True)
    attention, losses = attention_on_copied(loaded.model, parts), rises(loaded.model, parts)
    attention.to_csv(arguments.output / "attention_on_copied.csv", index=False)
    losses.to_csv(arguments.output / "rises.csv", index=False)
    draw(attention, losses, arguments.output / "inside.png")
    print(attention.pivot(index=["layer", "head"], columns="map", values="attention").round(3).to_string())
    print(
        losses.pivot(index=["layer", "without"], columns="class", values=["rise", "standard_error"])
        .round(3)
        .to_string()
    )


if __name__ == "__main__":
    main()
