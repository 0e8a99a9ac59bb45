"""Attention weights of one head as pictures: the softmax alone beside the composed weights.

The pictures are SVG with the page's own text colour and nothing behind them, so they suit a light and a dark page.
"""

from __future__ import annotations

import html
import io
import re
import threading
import warnings
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from ..analysis import LayerAttention
from ..common.optional import import_optional


MOST_TOKENS = 40  # that can be told apart on a page
_POSITIVE, _NEGATIVE, _HIDDEN = (0.16, 0.44, 0.90), (0.92, 0.38, 0.07), (0.5, 0.5, 0.5, 0.16)
_INK = "#010203"  # stands for the page's text colour until the picture is written
_LONGEST_LABEL = 14
# The settings of matplotlib belong to the process.
_DRAWING = threading.Lock()


def import_matplotlib() -> ModuleType:
    return import_optional("matplotlib", "Pictures need matplotlib: pip install 'dcformer[demo]'.")


def draw_attention(attention: LayerAttention, head: int, tokens: Sequence[str]) -> str:
    """
    One head's weights before and after composition, as HTML.

    Args:
        attention: Of a layer, from [`dcformer.analysis.layer_attention`].
        head: Its number, from 0.
        tokens: The text of every token. The last 40 are drawn.

    Returns:
        Two figures, which stand below each other where the page is narrow.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: for a head that the layer does not have.
    """
    heads = attention.plain.shape[0]
    if not 0 <= head < heads:
        raise ValueError(f"head must be from 0 to {heads - 1}, got {head}.")
    last = slice(-MOST_TOKENS, None)
    plain, composed = (weights[head].numpy() for weights in (attention.plain, attention.composed))  # (query, key)
    hidden = plain[last, last] == 0.0  # masked: no softmax of a float32 is exactly zero otherwise, but for ties of it
    labels = [_label(token) for token in tokens[last]]
    negative = int((composed < 0).sum())
    seen = int((plain != 0).sum())
    before = ("Softmax of this head alone", "Rows sum to one.")
    if attention.is_composed:
        sums = composed.sum(-1)
        after = (
            "Composed with the other heads",
            f"Signed: {negative} of {seen} weights are negative. Rows need not sum to one: these sum to "
            f"{sums.min():.2f} to {sums.max():.2f}.",
        )
    else:
        after = ("What the layer uses", "This model composes nothing, so both are the same.")
    figures = []
    for name, weights, (title, note) in (("plain", plain, before), ("composed", composed, after)):
        svg = _heat_map(weights[last, last], hidden, labels, name, is_signed=bool((weights < 0).any()))
        figures.append(
            f'<figure class="attention-{name}"><h4>{title}</h4>'
            f'<div role="img" aria-label="{html.escape(title)}, queries down, keys across">{svg}</div>'
            f"<figcaption>{note}</figcaption></figure>"
        )
    cut = f"<p>The last {MOST_TOKENS} of {len(tokens)} tokens are drawn.</p>" if len(tokens) > MOST_TOKENS else ""
    return f'<div class="attention">{"".join(figures)}</div>{cut}'


def _label(token: str) -> str:
    text = token.replace("\n", "\u21b5").replace("\t", "\u21e5").strip() or "\u2423"
    return text if len(text) <= _LONGEST_LABEL else text[: _LONGEST_LABEL - 1] + "\u2026"


def _heat_map(weights: np.ndarray, hidden: np.ndarray, labels: Sequence[str], name: str, is_signed: bool) -> str:
    """An SVG of (query, key) weights."""
    matplotlib = import_matplotlib()
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    largest = max(float(np.abs(weights).max()), 1e-6)
    shades = np.linspace(-1.0 if is_signed else 0.0, 1.0, 256)
    colours = [(*(_POSITIVE if shade >= 0 else _NEGATIVE), abs(shade) ** 0.75) for shade in shades]
    # In inches. Margins are reckoned by letters: to measure text, matplotlib would draw the picture twice.
    size, bar = max(4.0, 0.2 * len(labels)), 0.75
    margin = 0.35 + 0.08 * max(map(len, labels))
    width, height = margin + size + bar, margin + size + 0.1
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "axes.edgecolor": _INK,
        "axes.labelcolor": _INK,
        "text.color": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "text.parse_math": False,
    }
    with _DRAWING, matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that its fonts lack; the browser has its own
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes((margin / width, margin / height, size / width, size / height))
        veil = np.zeros((*hidden.shape, 4))
        veil[hidden] = _HIDDEN
        axes.imshow(veil, interpolation="nearest")
        low = -largest if is_signed else 0.0
        options = {"cmap": ListedColormap(colours), "vmin": low, "vmax": largest, "interpolation": "nearest"}
        image = axes.imshow(weights, **options)
        axes.set_xticks(range(len(labels)), labels, rotation=90)
        axes.set_yticks(range(len(labels)), labels)
        axes.tick_params(length=0, labelsize=9)
        figure.text((margin + size / 2) / width, 0.01, "key", ha="center", va="bottom")
        figure.text(0.01, (margin + size / 2) / height, "query", ha="left", va="center", rotation=90)
        for edge in axes.spines.values():
            edge.set_alpha(0.3)
        beside = figure.add_axes(((margin + size + 0.15) / width, (margin + size / 5) / height, 0.12 / width, 0.5))
        scale = figure.colorbar(image, cax=beside)
        scale.outline.set_alpha(0.3)
        scale.ax.tick_params(labelsize=8, length=2)
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, dpi=150, metadata=nothing)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    # Its own size, in points, would not shrink with the page.
    return re.sub(r'(?<= )(?:width|height)="[\d.]+pt" ?', "", svg, count=2)
