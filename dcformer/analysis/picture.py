"""Signed heat maps: blue above zero and orange below, which colour-blind readers distinguish, and grey where masked."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor


if TYPE_CHECKING:
    from matplotlib.colors import Colormap

POSITIVE, NEGATIVE, HIDDEN = "#2970e6", "#eb6112", "#9aa0a6"
_LONGEST_LABEL = 14
_WIDEST_CELL = 28  # pixels


def heat_map(
    values: Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    strongest: float | None = None,
    zero_is_hidden: bool = True,
) -> str:
    """
    An SVG element of a matrix; a cell shows its row, column and value when a pointer rests on it.

    Args:
        values (`Tensor`): (rows, columns).
        rows, columns: Labels, which are shortened.
        title: What is drawn, for screen readers.
        strongest (*optional*): Absolute value of the full colour. None: the largest.
        zero_is_hidden (defaults to `True`): Draw cells of exactly zero grey, as masked keys.
    """
    strongest = max(float(values.abs().max()) if strongest is None else strongest, 1e-6)
    row_labels, column_labels = ([html.escape(label(text)) for text in texts] for texts in (rows, columns))
    cells = []
    for y, row in enumerate(values.tolist()):
        for x, value in enumerate(row):
            colour, opacity = POSITIVE if value > 0 else NEGATIVE, min(abs(value) / strongest, 1.0) ** 0.75
            about = f"<title>{row_labels[y]} / {column_labels[x]}: {value:.3f}</title>"
            if value == 0 and zero_is_hidden:
                colour, opacity, about = HIDDEN, 0.2, ""
            cell = f'<rect x="{x}" y="{y}" width="1" height="1" fill="{colour}" fill-opacity="{opacity:.2f}">'
            cells.append(f"{cell}{about}</rect>")
    texts = [f'<text x="-.3" y="{y + 0.75}" text-anchor="end">{text}</text>' for y, text in enumerate(row_labels)]
    texts += [
        f'<text transform="translate({x + 0.25} {len(rows) + 0.3}) rotate(90)">{text}</text>'
        for x, text in enumerate(column_labels)
    ]
    left, below = (0.8 + 0.45 * max(len(label(text)) for text in texts) for texts in (rows, columns))
    width, height = len(columns), len(rows)
    frame = f'<rect width="{width}" height="{height}" fill="none" stroke="currentColor" stroke-width=".04"/>'
    view = f"{-left} -.1 {width + left + 0.1} {height + below + 0.1}"
    style = f"max-width: {_WIDEST_CELL * (width + left):.0f}px"
    return (
        f'<svg role="img" aria-label="{html.escape(title)}" viewBox="{view}" style="{style}" font-size=".8" '
        f'fill="currentColor">{"".join([*cells, frame, *texts])}</svg>'
    )


def signed_colours() -> Colormap:
    """The colours of heat maps for matplotlib, with grey for NaN; use them with vmin = -vmax."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("signed", (NEGATIVE, "white", POSITIVE)).with_extremes(bad="0.9")


def label(token: str) -> str:
    """A token in at most 14 characters, with visible signs for white space."""
    text = token.replace("\n", "\u21b5").replace("\t", "\u21e5").strip() or "\u2423"
    return text if len(text) <= _LONGEST_LABEL else text[: _LONGEST_LABEL - 1] + "\u2026"
