"""A page and pictures of a model's inside, in one folder: what `dcformer analyse` writes."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..common.plotting import draw_grid, picture
from ..modeling_dcformer import DCFormerAttention
from .branches import BRANCHES, OWN_HEAD, branch_shares, what_matters
from .diversity import head_diversity, map_diversity
from .head_maps import HeadMapStatistics, head_map_statistics
from .picture import NEGATIVE, POSITIVE, heat_map, label, signed_colours
from .recording import Recording, attention_layers, chosen, record


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

MOST_TOKENS = 32  # of a text that is drawn
_MOST_DRAWN_HEADS = 64
_HEADS_IN_A_ROW = 8
# Colours of Okabe and Ito, and hatches for those who see or print no colours.
_LOOKS = {
    OWN_HEAD: ("#999999", ""),
    "static": ("#F0E442", ".."),
    "query_low_rank": ("#0072B2", ""),
    "query_gate": ("#56B4E9", "//"),
    "key_low_rank": ("#D55E00", ""),
    "key_gate": ("#E69F00", "\\\\"),
}
_STAGES = {"scores": "before the softmax", "weights": "after the softmax"}
_CSS = """
:root {color-scheme: light}
body {font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; color: #1f2328}
h1, h2 {line-height: 1.2} pre {background: #f3f4f6; padding: .7rem; white-space: pre-wrap}
.row, .pairs {display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(260px, 1fr))}
.pairs {grid-template-columns: repeat(auto-fill, minmax(max(320px, 40%), 1fr))}
figure {margin: 0; min-width: 0} h4 {margin: .5rem 0}
figure svg, img {width: 100%; height: auto} figcaption, .note {color: #57606a} summary {cursor: pointer}
.key span {display: inline-block; width: 1em; height: 1em; vertical-align: -.1em; margin: 0 .3em 0 1em}
"""


def analyse(
    model: Any,
    texts: Sequence[Sequence[int]],
    output: str | Path,
    tokenizer: Any,
    name: str = "model",
    layers: Sequence[int] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Path:
    """
    Write `report.html`, which needs no network, with pictures (PNG and SVG) and tables (CSV) beside it.

    Args:
        model: As of [`record`]. A model that composes nothing has less to show.
        texts: Token ids of each text. The last tokens of the first are drawn; means are taken over all.
        output: Folder, made if it is not there.
        tokenizer: Of the model.
        name (defaults to `"model"`): For the headings.
        layers (*optional*): Layers whose heads are drawn. None: all, or so many that 64 heads are drawn.
        progress (*optional*): Called with what is done next, and the numbers of steps that are done and of all.

    Returns:
        The path of the page.

    Raises:
        ValueError: without a text, and for a layer that the model lacks.
    """
    if not texts:
        raise ValueError("There is no text to analyse; give at least one.")
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    heads, count = model.config.num_attention_heads, len(attention_layers(model))
    if layers is None:
        drawn = max(min(_MOST_DRAWN_HEADS // heads, count), 1)
        layers = sorted({round(place) for place in torch.linspace(0, count - 1, drawn).tolist()})
    drawn_layers = chosen(layers, count, "layers")
    composes = isinstance(attention_layers(model)[0], DCFormerAttention) and model.config.composes_heads
    steps = 2 + 3 * composes
    report = progress or (lambda *_: None)
    report("Recording maps", 0, steps)
    maps = ["weights", "composed_weights"] if composes and model.config.compose_post else ["weights"]
    recording = record(model, texts[0], maps, layers=drawn_layers, tokenizer=tokenizer)
    report("Measuring diversity", 1, steps)
    curves, effective = head_diversity(model), map_diversity(model, texts)
    effective.to_csv(output / "map_diversity.csv", index=False)
    sections = [_diversity_section(output, curves, effective)]
    if composes:
        report("Measuring branches", 2, steps)
        shares = branch_shares(model, texts)
        shares.to_csv(output / "branch_shares.csv", index=False)
        report("Reading head maps", 3, steps)
        statistics = head_map_statistics(model, texts, drawn_layers)
        report("Switching branches off", 4, steps)
        losses = what_matters(model, texts, progress=lambda done, total: report("Switching branches off", done, total))
        losses.to_csv(output / "what_matters.csv", index=False)
        sections += [_shares_section(output, shares), _matters_section(losses), _lending_section(output, statistics)]
    sections.append(_attention_section(output, recording))
    tokens = sum(map(len, texts))
    page = _page(name, tokenizer.decode(texts[0]), f"{count} layers of {heads} heads, {tokens} tokens", sections)
    path = output / "report.html"
    path.write_text(page, encoding="utf-8")
    report("Writing", steps, steps)
    return path


def _page(name: str, text: str, about: str, sections: Sequence[str]) -> str:
    key = (
        f'<p class="key">Heat maps:<span style="background:{POSITIVE}"></span>above zero'
        f'<span style="background:{NEGATIVE}"></span>below zero<span style="background:#ddd"></span>masked. '
        "Rest the pointer on a cell to read it.</p>"
    )
    title = f"{html.escape(name)}: inside"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{title}</title><style>{_CSS}</style></head><body><h1>{title}</h1>'
        f"<p>{html.escape(about)}. The first text:</p><pre>{html.escape(text)}</pre>{key}{''.join(sections)}"
        "</body></html>"
    )


def _section(title: str, note: str, *parts: str) -> str:
    return f'<section><h2>{title}</h2><p class="note">{note}</p>{"".join(parts)}</section>'


def _drawn(output: Path, name: str, size: tuple[float, float], draw: Callable[[Figure], None]) -> str:
    """Draw a picture into the folder as PNG and SVG, and return it as an element of the page."""
    for ending in (".png", ".svg"):
        with picture(output / f"{name}{ending}", size, "analysis") as figure:
            draw(figure)
    data = base64.b64encode((output / f"{name}.svg").read_bytes()).decode()
    return f'<img alt="{html.escape(name)}" src="data:image/svg+xml;base64,{data}">'


def _diversity_section(output: Path, curves: dict[str, Tensor], effective: DataFrame) -> str:
    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        for (name, values), style in zip(curves.items(), ("-", "--")):
            mean = values.mean(0)
            left.plot(range(1, len(mean) + 1), mean, style, color="#0072B2", label=name.replace("_", " "))
        left.set(xlabel="Principal components", ylabel="Captured variance", title="Projections, mean over layers")
        for (name, rows), (style, colour) in zip(effective.groupby("map", sort=False), (("o-", "0.6"), ("s--", "0.1"))):
            right.plot(rows.layer, rows.effective_heads, style, color=colour, label=str(name).replace("_", " "))
        right.set(xlabel="Layer", ylabel=f"Different heads, of {effective.heads[0]}", title="Attention over the texts")
        right.set_ylim(0, 1.02 * effective.heads[0])
        right.locator_params(axis="x", integer=True)
        for axis in (left, right):
            draw_grid(axis)
            axis.legend(frameon=False)

    note = (
        "Left, as Figure 5 of the paper: a lower curve means projections that are more diverse. Right: how many heads "
        "of a layer see different things, before and after composition (the Vendi score of cosine similarities)."
    )
    return _section("Diversity of heads", note, _drawn(output, "diversity", (9, 3.2), draw))


def _shares_section(output: Path, shares: DataFrame) -> str:
    means = shares.groupby(["map", "layer", "branch"]).share.mean()
    kinds = [kind for kind in _STAGES if kind in means.index]

    def draw(figure: Figure) -> None:
        for kind, axis in zip(kinds, figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]):
            table = means[kind].unstack("branch")
            below = 0.0
            for branch in [each for each in _LOOKS if each in table and table[each].sum() > 0]:
                colour, hatch = _LOOKS[branch]
                look = {"color": colour, "hatch": hatch, "edgecolor": "white", "label": branch.replace("_", " ")}
                axis.bar(table.index, table[branch], bottom=below, **look)
                below = below + table[branch]
            axis.set(xlabel="Layer", title=f"Composed {kind}, {_STAGES[kind]}", ylim=(0, 1))
            axis.locator_params(axis="x", integer=True)
        handles, labels = axis.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.axes[0].set_ylabel("Share")

    note = (
        "The terms of equation 7 by their absolute sums over all pairs of a query and a key that it sees, mean over "
        "heads, as Figures 7 and 8 of the paper show of one pair. branch_shares.csv has every head."
    )
    return _section("What each branch adds", note, _drawn(output, "shares", (9, 4), draw))


def _matters_section(losses: DataFrame) -> str:
    table = losses.pivot(index="layer", columns="branch", values="difference")
    table = table[[branch for branch in BRANCHES if branch in table]].fillna(0.0)
    rows, columns = [f"layer {layer}" for layer in table.index], [name.replace("_", " ") for name in table]
    drawn = heat_map(
        torch.tensor(table.to_numpy().copy()), rows, columns, "Loss without a branch", zero_is_hidden=False
    )
    largest = table.abs().to_numpy().max()
    note = (
        "How much the loss on these texts rises, in nats per token, if a branch of a layer is switched off (blue), or "
        f"falls (orange); the largest change is {largest:.3f}. what_matters.csv has standard errors."
    )
    return _section("What matters", note, f"<figure>{drawn}</figure>")


def _lending_section(output: Path, statistics: dict[tuple[int, str], HeadMapStatistics]) -> str:
    places = sorted(statistics)
    kinds = [kind for kind in _STAGES if any(kind == found for _, found in places)]
    numbers = sorted({layer for layer, _ in places})

    # What a head keeps would outshine what it takes.
    lent = {place: found.lending.clone().fill_diagonal_(0.0) for place, found in statistics.items()}
    strongest = max(float(shares.max()) for shares in lent.values())

    def axes_of(figure: Figure) -> Iterator[tuple[Axes, Tensor]]:
        figure.set_layout_engine("compressed")
        for line, kind in zip(figure.subplots(len(kinds), len(numbers), squeeze=False), kinds):
            for axis, layer in zip(line, numbers):
                axis.set_title(f"Layer {layer}, {kind}", fontsize=9)
                yield axis, lent[layer, kind]

    def draw_matrices(figure: Figure) -> None:
        for axis, shares in axes_of(figure):
            image = axis.imshow(shares, cmap="Blues", vmin=0, vmax=strongest)
            axis.locator_params(integer=True)
            axis.label_outer()
        figure.colorbar(image, ax=figure.axes, label="Share that a head (across) takes from a head (down)")

    def draw_graphs(figure: Figure) -> None:
        for axis, shares in axes_of(figure):
            angles = torch.arange(len(shares)) * 2 * math.pi / len(shares)
            points = torch.stack((angles.sin(), angles.cos()), dim=1).tolist()
            for taker, (x, y) in enumerate(points):
                axis.text(x, y, str(taker), ha="center", va="center")
                for share, lender in zip(*(each.tolist() for each in shares[:, taker].topk(min(3, len(shares) - 1)))):
                    look = {"color": POSITIVE, "alpha": 0.7, "shrinkA": 8, "shrinkB": 8, "arrowstyle": "-|>"}
                    look |= {"linewidth": 4 * share / strongest, "connectionstyle": "arc3,rad=.15"}
                    axis.annotate("", (x, y), points[lender], arrowprops=look)
            axis.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), aspect="equal")
            axis.set_axis_off()

    parts = []
    for layer, kind in places:
        found = statistics[layer, kind]
        heads = [f"head {number}" for number in range(len(found.lending))]
        drawn = heat_map(lent[layer, kind], heads, heads, f"Layer {layer}, who lends to whom", strongest)
        largest, smallest = found.singular_values[[0, -1]].tolist()
        caption = (
            f"Heads take {found.borrowed.min():.0%} to {found.borrowed.max():.0%} from others. Effective rank "
            f"{found.effective_rank:.2f} of {len(heads)}, of what is added {found.added_rank:.2f}; singular values "
            f"from {largest:.2f} to {smallest:.2f}."
        )
        parts.append(
            f"<figure><h4>Layer {layer}, {_STAGES[kind]}</h4>{drawn}<figcaption>{caption}</figcaption></figure>"
        )
    size = 2.2 * len(numbers) + 1, 2.2 * len(kinds) + 0.6
    _drawn(output, "lending", size, draw_matrices)
    graphs = _drawn(output, "lending_graph", size, draw_graphs)
    note = (
        "The matrices of equation 8 over pairs of tokens: from which heads (rows) a head (column) takes, as the mean "
        "share of absolute values. What a head keeps of its own, the diagonal, is left out; one scale for all. Arrows "
        "lead to every head from the three of which it takes most."
    )
    return _section("Who lends to whom", note, f'<div class="row">{"".join(parts)}</div>', graphs)


def _attention_section(output: Path, recording: Recording) -> str:
    labels, parts = recording.tokens[0][-MOST_TOKENS:], []
    titles = dict(zip(recording.maps, ("before composition", "after composition")))
    note = (
        "as they leave the softmax, before their composition, and as the layer uses them, after it: signed, with rows "
        "that need not sum to one."
    )
    if len(titles) == 1:
        titles, note = {"weights": "softmax"}, "of a model that does not compose them."
    for layer in recording["weights"]:
        cut = {name: recording[name][layer][0, :, -MOST_TOKENS:, -MOST_TOKENS:] for name in titles}
        _draw_heads(output, f"attention_layer{layer}", cut, labels, titles)
        figures = []
        for head in range(len(recording.heads)):
            for name, title in titles.items():
                shown = cut[name][head]  # (query, key)
                drawn = heat_map(shown, labels, labels, f"Layer {layer}, head {head}, {title}")
                caption = f"Colour scale: up to {shown.abs().max():.2f}; {int((shown < 0).sum())} are negative."
                heading = f"<h4>Head {head}, {title}</h4>"
                figures.append(f"<figure>{heading}{drawn}<figcaption>{caption}</figcaption></figure>")
        is_open = " open" if not parts else ""
        parts.append(
            f'<details{is_open}><summary>Layer {layer}</summary><div class="pairs">{"".join(figures)}</div></details>'
        )
    note = f"Weights between the last {len(labels)} tokens, queries down and keys across, {note}"
    return _section("Attention", f"{note} Every map has a scale of its own.", *parts)


def _draw_heads(
    output: Path, name: str, maps: dict[str, Tensor], labels: Sequence[str], titles: dict[str, str]
) -> None:
    """Draw a row of heads for every map, (heads, query, key) each, between these tokens."""
    heads = len(next(iter(maps.values())))
    lines, columns = math.ceil(heads / _HEADS_IN_A_ROW) * len(maps), min(heads, _HEADS_IN_A_ROW)

    def draw(figure: Figure) -> None:
        figure.set_layout_engine("compressed")
        axes = figure.subplots(lines, columns, squeeze=False)
        for axis in axes.flat:
            axis.set_axis_off()
        for number, (kind, values) in enumerate(maps.items()):
            for head, weights in enumerate(values):
                line, column = head // _HEADS_IN_A_ROW * len(maps) + number, head % _HEADS_IN_A_ROW
                axis = axes[line, column]
                strongest = max(float(weights.abs().max()), 1e-6)
                shown = weights.masked_fill(weights == 0, torch.nan)
                axis.imshow(shown, cmap=signed_colours(), vmin=-strongest, vmax=strongest)
                axis.set_title(f"Head {head}, {titles[kind]}", fontsize=7)
                axis.set_axis_on()
                ticks = range(len(labels)), [label(text) for text in labels]
                axis.set_xticks(*(ticks if number == len(maps) - 1 else ([], [])), rotation=90, fontsize=5)
                axis.set_yticks(*(ticks if column == 0 else ([], [])), fontsize=5)

    _drawn(output, name, (2.2 * columns + 0.8, 2.4 * lines + 0.8), draw)
