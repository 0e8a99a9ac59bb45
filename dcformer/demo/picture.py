"""Attention weights of one head as SVG: the softmax alone beside the composed weights."""

from __future__ import annotations

import html
from collections.abc import Sequence

from torch import Tensor


MOST_TOKENS = 40  # that can be told apart on a page
_POSITIVE, _NEGATIVE = "#2970e6", "#eb6112"
_LONGEST_LABEL = 14


def draw_attention(plain: Tensor, composed: Tensor, tokens: Sequence[str], is_composed: bool) -> str:
    """Two figures as HTML: a head's weights (query, key) before and after composition, between the last 40 tokens."""
    before = ("Softmax of this head alone", "Rows sum to one.")
    after = ("What the layer uses", "This model composes nothing, so both are the same.")
    if is_composed:
        sums = composed.sum(-1)
        after = (
            "Composed with the other heads",
            f"Signed: {int((composed < 0).sum())} of {int((plain != 0).sum())} weights are negative (orange). Rows "
            f"need not sum to one: these sum to {sums.min():.2f} to {sums.max():.2f}.",
        )
    labels = [_label(token) for token in tokens[-MOST_TOKENS:]]
    figures = [
        f"<figure><h4>{title}</h4>{_heat_map(weights[-MOST_TOKENS:, -MOST_TOKENS:], labels, title)}"
        f"<figcaption>{note} The strongest colour is {weights.abs().max():.2f}.</figcaption></figure>"
        for weights, (title, note) in ((plain, before), (composed, after))
    ]
    cut = f"<p>The last {MOST_TOKENS} of {len(tokens)} tokens are drawn.</p>" if len(tokens) > MOST_TOKENS else ""
    return f'<div class="attention">{"".join(figures)}</div>{cut}'


def _label(token: str) -> str:
    text = token.replace("\n", "\u21b5").replace("\t", "\u21e5").strip() or "\u2423"
    return text if len(text) <= _LONGEST_LABEL else text[: _LONGEST_LABEL - 1] + "\u2026"


def _heat_map(weights: Tensor, labels: Sequence[str], title: str) -> str:
    """An SVG of (query, key) weights, a unit long and wide each; keys out of sight are grey."""
    strongest, count = max(float(weights.abs().max()), 1e-6), len(labels)
    cells = []
    for query, row in enumerate(weights.tolist()):
        for key, weight in enumerate(row):
            # A softmax in float32 is exactly zero where a key is masked.
            colour, opacity = ("currentColor", 0.15) if weight == 0 else (_POSITIVE if weight > 0 else _NEGATIVE, 1.0)
            opacity *= (abs(weight) / strongest) ** 0.75 if weight else 1.0
            cells.append(f'<rect x="{key}" y="{query}" width="1" height="1" fill="{colour}" opacity="{opacity:.3f}"/>')
    texts = []
    for place, label in enumerate(map(html.escape, labels)):
        texts.append(f'<text x="-.3" y="{place + 0.75}" text-anchor="end">{label}</text>')
        texts.append(f'<text transform="translate({place + 0.25} {count + 0.3}) rotate(90)">{label}</text>')
    margin = 1 + 0.5 * max(map(len, labels))
    return (
        f'<svg role="img" aria-label="{title}, queries down, keys across" viewBox="{-margin} 0 {count + margin} '
        f'{count + margin}" font-size=".8" fill="currentColor">{"".join(cells + texts)}</svg>'
    )
