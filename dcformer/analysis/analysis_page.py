"""The page, pictures and tables that `dcformer analyse` writes about a model's attention."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.plotting import draw_grid, picture
from ..loading import NOT_A_NUMBER
from ..modeling_dcformer import DCFormerAttention
from .branches import BRANCHES, OWN_HEAD, STAGES, branch_shares, what_matters
from .diversity import head_diversity, map_diversity
from .head_maps import HeadMapStatistics, head_map_statistics
from .picture import NEGATIVE, POSITIVE, heat_map, label, signed_colours
from .recording import Recording, attention_layers, forwards, record


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

Panels: TypeAlias = Sequence[tuple[str, Tensor]]  # titles and matrices

MOST_TOKENS = 32  # that are drawn, the last of the text
_MOST_DRAWN_HEADS = 64
_PANELS_IN_A_ROW = 8
# Colours of Okabe and Ito, which colour-blind readers distinguish, and hatches for print without colours.
_LOOKS = {
    OWN_HEAD: ("#999999", ""),
    "static": ("#F0E442", ".."),
    "query_low_rank": ("#0072B2", ""),
    "query_gate": ("#56B4E9", "//"),
    "key_low_rank": ("#D55E00", ""),
    "key_gate": ("#E69F00", "\\\\"),
}
_WHERE = {"scores": "before the softmax", "weights": "after the softmax"}
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
_ARROW: dict[str, Any] = {"color": POSITIVE, "alpha": 0.7, "shrinkA": 8, "shrinkB": 8, "arrowstyle": "-|>"}
_ARROW |= {"connectionstyle": "arc3,rad=.15"}


def analyse(
    model: PreTrainedModel,
    texts: Sequence[Sequence[int]],
    output: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    name: str = "model",
    layers: Sequence[int] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Path:
    """
    Write `report.html`, which needs no network, and beside it pictures (PNG and SVG) and tables (CSV).

    Args:
        model: As for [`record`]. The page of a model that composes nothing has attention and diversity only.
        texts: Token ids of each text. The attention of the first is drawn; means are taken over all.
        output: Folder, created if it does not exist.
        tokenizer: The model's tokenizer.
        name (defaults to `"model"`): The model's name in the headings.
        layers (*optional*): Layers with heads to draw. None: as many, evenly spread, as have 64 heads in all.
        progress (*optional*): Called with the name of the next step, and the number of steps that are done and of all.

    Returns:
        The path of the page.

    Raises:
        ValueError: if there is no text, a layer that the model lacks, or the output is not finite.
    """
    if not texts:
        raise ValueError("There is no text to analyse; give at least one.")
    with torch.no_grad():
        if not model(**forwards(model, texts[0])[0])[0].isfinite().all():
            raise ValueError(f"The model's output is not finite: {NOT_A_NUMBER}")
    output = Path(output)
    output.resolve().mkdir(parents=True, exist_ok=True)  # also of a link to nothing yet
    attentions, heads = attention_layers(model), model.config.num_attention_heads
    if layers is None:
        drawn = max(min(_MOST_DRAWN_HEADS // heads, len(attentions)), 1)
        layers = torch.linspace(0, len(attentions) - 1, drawn).round().int().tolist()
    composes = isinstance(attentions[0], DCFormerAttention) and model.config.composes_heads
    steps = 5 if composes else 2
    progress = progress or (lambda what, done, total: None)
    progress("Recording maps", 0, steps)
    maps = ["weights", "composed_weights"] if composes and model.config.compose_post else ["weights"]
    recording = record(model, texts[0], maps, layers=layers, tokenizer=tokenizer)
    progress("Measuring diversity", 1, steps)
    curves, effective = head_diversity(model), map_diversity(model, texts)
    effective.to_csv(output / "map_diversity.csv", index=False)
    sections = [_diversity_section(output, curves, effective)]
    if composes:
        progress("Measuring branches", 2, steps)
        shares = branch_shares(model, texts)
        shares.to_csv(output / "branch_shares.csv", index=False)
        progress("Reading head maps", 3, steps)
        statistics = head_map_statistics(model, texts, layers)
        progress("Switching branches off", 4, steps)
        losses = what_matters(model, texts, progress=lambda *counts: progress("Switching branches off", *counts))
        losses.to_csv(output / "what_matters.csv", index=False)
        sections += [_shares_section(output, shares), _matters_section(losses), _lending_section(output, statistics)]
    sections.append(_attention_section(output, recording))
    about = f"{len(attentions)} layers of {heads} heads, {sum(map(len, texts))} tokens"
    path = output / "report.html"
    path.write_text(_page(name, tokenizer.decode(texts[0]), about, sections), encoding="utf-8")
    progress("Writing", steps, steps)
    return path


def _page(name: str, text: str, about: str, sections: Sequence[str]) -> str:
    title = f"{html.escape(name)}: inside"
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>{title}</title><style>{_CSS}</style></head>
<body><h1>{title}</h1><p>{about}. The first text:</p><pre>{html.escape(text)}</pre>
<p class="key">Heat maps: <span style="background:{POSITIVE}"></span>above zero
<span style="background:{NEGATIVE}"></span>below zero <span style="background:#ddd"></span>masked.
Rest the pointer on a cell to read it.</p>{"".join(sections)}</body></html>"""


def _section(title: str, note: str, *parts: str) -> str:
    return f'<section><h2>{title}</h2><p class="note">{note}</p>{"".join(parts)}</section>'


def _figure(title: str, drawing: str, caption: str) -> str:
    return f"<figure><h4>{title}</h4>{drawing}<figcaption>{caption}</figcaption></figure>"


def _drawn(output: Path, name: str, size: tuple[float, float], draw: Callable[[Figure], None]) -> str:
    """Draw a picture into the folder as PNG and SVG; return an HTML element that contains it."""
    with picture(output / f"{name}.svg", size, "analysis", ".png") as figure:
        draw(figure)
    data = base64.b64encode((output / f"{name}.svg").read_bytes()).decode()
    return f'<img alt="{name}" src="data:image/svg+xml;base64,{data}">'


def _axes_of(figure: Figure, panels: Panels, columns: int, **options: Any) -> Iterator[tuple[Axes, Tensor]]:
    """Yield axes and the matrix of each panel, with this many panels in a row."""
    figure.set_layout_engine("compressed")
    axes = figure.subplots(math.ceil(len(panels) / columns), columns, squeeze=False, **options).ravel()
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, (title, matrix) in zip(axes, panels):
        axis.set_title(title, fontsize=7)
        yield axis, matrix


def _draw_panels(
    output: Path, name: str, panels: Panels, columns: int, labels: Sequence[str], scale: str | None = None
) -> None:
    """Draw matrices; each has a colour scale of its own, unless `scale` says what the one of all shows."""
    strongest = max(float(matrix.abs().max()) for _, matrix in panels)
    ticks, size = (range(len(labels)), [label(text) for text in labels]), 5 if len(labels) > 12 else 8

    def draw(figure: Figure) -> None:
        for number, (axis, matrix) in enumerate(_axes_of(figure, panels, columns, sharex=True, sharey=True)):
            most = max(strongest if scale else float(matrix.abs().max()), 1e-6)
            shown = matrix.masked_fill(matrix == 0, torch.nan)
            image = axis.imshow(shown, cmap=signed_colours(), vmin=-most, vmax=most)
            axis.set_xticks(*ticks, rotation=90, fontsize=size)
            axis.set_yticks(*ticks, fontsize=size)
            axis.tick_params(labelbottom=number + columns >= len(panels))  # no panel is below
        if scale:
            figure.colorbar(image, ax=figure.axes, label=scale).ax.set_ylim(0, strongest)

    _drawn(output, name, (2.2 * columns + 0.8, 2.4 * math.ceil(len(panels) / columns) + 0.8), draw)


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
        "Left, as Figure 5 of the paper: a lower curve means more diverse projections. Right: how many heads attend "
        "differently, before and after composition (the Vendi score of cosine similarities)."
    )
    return _section("Diversity of heads", note, _drawn(output, "diversity", (9, 3.2), draw))


def _shares_section(output: Path, shares: DataFrame) -> str:
    means = shares.groupby(["map", "layer", "branch"]).share.mean()
    kinds = [kind for kind in STAGES if kind in means.index]

    def draw(figure: Figure) -> None:
        for kind, axis in zip(kinds, figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]):
            table = means[kind].unstack("branch")
            table = table[[branch for branch in _LOOKS if table[branch].sum() > 0]]
            bottoms = table.cumsum(axis="columns") - table
            for branch, shares in table.items():
                colour, hatch = _LOOKS[branch]
                look = {"color": colour, "hatch": hatch, "edgecolor": "white", "label": branch.replace("_", " ")}
                axis.bar(table.index, shares, bottom=bottoms[branch], **look)
            axis.set(xlabel="Layer", title=f"Composed {kind}, {_WHERE[kind]}", ylim=(0, 1))
            axis.locator_params(axis="x", integer=True)
        handles, labels = axis.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.axes[0].set_ylabel("Share")

    note = (
        "The absolute sums of the terms of equation 7 over all pairs of a query and a key that it sees, mean over "
        "heads; Figures 7 and 8 of the paper show them for one pair. branch_shares.csv has every head."
    )
    return _section("What each branch adds", note, _drawn(output, "shares", (9, 4), draw))


def _matters_section(losses: DataFrame) -> str:
    table = losses.pivot(index="layer", columns="branch", values="difference")
    table = table[[branch for branch in BRANCHES if branch in table]].fillna(0.0)
    rows, columns = [f"layer {layer}" for layer in table.index], [name.replace("_", " ") for name in table]
    values = torch.tensor(table.to_numpy().copy())
    drawn, largest = heat_map(values, rows, columns, "Loss without a branch", zero_is_hidden=False), values.abs().max()
    note = (
        "How much the loss on these texts rises (blue) or falls (orange) if a branch of a layer is switched off. The "
        f"largest change is {largest:.3f} nats per token. "
        + ("what_matters.csv has standard errors." if losses.standard_error.notna().any() else "One text has no error.")
    )
    return _section("What matters", note, f"<figure>{drawn}</figure>")


def _lending_section(output: Path, statistics: dict[tuple[int, str], HeadMapStatistics]) -> str:
    panels, captions = [], []
    for layer, kind in sorted(statistics, key=lambda of: (of[1], of[0])):
        means = statistics[layer, kind]
        # What a head keeps would outshine what it takes.
        panels.append((f"Layer {layer}, {_WHERE[kind]}", means.lending.clone().fill_diagonal_(0.0)))
        largest, smallest = means.singular_values[[0, -1]].tolist()
        captions.append(
            f"Heads take {means.borrowed.min():.0%} to {means.borrowed.max():.0%} from others. Effective rank "
            f"{means.effective_rank:.2f} of {len(means.lending)}, of what is added {means.added_rank:.2f}; singular "
            f"values from {largest:.2f} to {smallest:.2f}."
        )
    strongest = max(float(shares.max()) for _, shares in panels)
    columns = len({layer for layer, _ in statistics})

    def draw_graphs(figure: Figure) -> None:
        for axis, shares in _axes_of(figure, panels, columns):
            angles = torch.arange(len(shares)) * 2 * math.pi / len(shares)
            points = torch.stack((angles.sin(), angles.cos()), dim=1).tolist()
            for taker, (x, y) in enumerate(points):
                axis.text(x, y, str(taker), ha="center", va="center")
                for lender in shares[:, taker].topk(min(3, len(shares) - 1)).indices.tolist():
                    width = 4 * float(shares[lender, taker]) / strongest
                    axis.annotate("", (x, y), points[lender], arrowprops=_ARROW | {"linewidth": width})
            axis.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), aspect="equal")
            axis.set_axis_off()

    numbers = [str(number) for number in range(len(panels[0][1]))]
    heads = [f"head {number}" for number in numbers]
    figures = [
        _figure(title, heat_map(shares, heads, heads, f"{title}, who lends to whom", strongest), caption)
        for (title, shares), caption in zip(panels, captions)
    ]
    scale = "Share that a head (across) takes from a head (down)"
    _draw_panels(output, "lending", panels, columns, numbers, scale)
    size = 2.2 * columns + 1, 2.2 * len(panels) / columns + 0.6
    graphs = _drawn(output, "lending_graph", size, draw_graphs)
    note = (
        "The matrices of equation 8: the share that a head (column) takes from each head (row), by absolute values, as "
        "means over pairs of tokens. What a head keeps of itself, the diagonal, is left out; all have one scale. "
        "Arrows lead to every head from the three from which it takes most."
    )
    return _section("Who lends to whom", note, f'<div class="row">{"".join(figures)}</div>', graphs)


def _attention_section(output: Path, recording: Recording) -> str:
    labels = recording.tokens[0][-MOST_TOKENS:]
    titles, note = {"weights": "softmax"}, "of a model that does not compose them."
    if len(recording.maps) > 1:
        titles = {"weights": "before composition", "composed_weights": "after composition"}
        note = (
            "before composition, as they leave the softmax, and after it, as the layer uses them: signed, with rows "
            "that need not sum to one."
        )
    parts: list[str] = []
    for layer in recording["weights"]:
        panels = [
            (f"Head {head}, {title}", recording[name][layer][0, head, -MOST_TOKENS:, -MOST_TOKENS:])  # (query, key)
            for head in recording.heads
            for name, title in titles.items()
        ]
        _draw_panels(output, f"attention_layer{layer}", panels, min(len(panels), _PANELS_IN_A_ROW), labels)
        figures = []
        for title, weights in panels:
            caption = f"Colour scale: up to {weights.abs().max():.2f}; {int((weights < 0).sum())} are negative."
            figures.append(_figure(title, heat_map(weights, labels, labels, f"Layer {layer}, {title}"), caption))
        summary = f"<details{'' if parts else ' open'}><summary>Layer {layer}</summary>"
        parts.append(f'{summary}<div class="pairs">{"".join(figures)}</div></details>')
    note = f"Weights between the last {len(labels)} tokens, queries down and keys across, {note}"
    return _section("Attention", f"{note} Every map has a different scale.", *parts)
