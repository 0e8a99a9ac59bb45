"""Attention weights of one head as SVG, before their composition and after it."""

from collections.abc import Sequence

from torch import Tensor

from ..analysis import heat_map


MOST_TOKENS = 48  # that can be told apart on a page


def draw_attention(plain: Tensor, composed: Tensor, tokens: Sequence[str], is_composed: bool) -> str:
    """Two figures as HTML: a head's weights (query, key) before and after composition, between the last 48 tokens."""
    before = "Rows sum to one."
    after = "This layer does not compose its weights, so both are the same."
    if is_composed:
        sums = composed.sum(-1)
        after = (
            f"Signed: {int((composed < 0).sum())} of {int((plain != 0).sum())} weights are negative (orange). Rows "
            f"need not sum to one: these sum to {sums.min():.2f} to {sums.max():.2f}."
        )
    labels, figures = tokens[-MOST_TOKENS:], []
    for title, weights, note in (("Before composition", plain, before), ("After composition", composed, after)):
        drawn = heat_map(weights[-MOST_TOKENS:, -MOST_TOKENS:], labels, labels, f"{title}, queries down, keys across")
        note += f" Colour scale: up to {weights.abs().max():.2f}."
        figures.append(f"<figure><h4>{title}</h4>{drawn}<figcaption>{note}</figcaption></figure>")
    cut = f"<p>The last {MOST_TOKENS} of {len(tokens)} tokens are drawn.</p>" if len(tokens) > MOST_TOKENS else ""
    return f'<div class="attention">{"".join(figures)}</div>{cut}'
