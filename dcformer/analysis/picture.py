"""Signed heat maps: blue above zero, orange below, which every eye tells apart, and grey where masked."""

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
    An SVG element of a matrix, whose cells say their row, column and value when a pointer rests on them.

    Args:
        values (`Tensor`): (rows, columns).
        rows, columns: Labels, shortened here.
        title: What is drawn, for those who do not see it.
        strongest (*optional*): Value of the full colour. None: the largest absolute value.
        zero_is_hidden (defaults to `True`): Draw cells of exactly zero grey, as the keys that a query does not see.
    """
    strongest = max(float(values.abs().max()) if strongest is None else strongest, 1e-6)
    row_labels, column_labels = ([html.escape(label(text)) for text in texts] for texts in (rows, columns))
    cells = []
    for y, line in enumerate(values.tolist()):
        for x, value in enumerate(line):
            if value == 0 and zero_is_hidden:
                cells.append(f'<rect x="{x}" y="{y}" width="1" height="1" fill="{HIDDEN}" opacity=".2"/>')
                continue
            opacity = min(abs(value) / strongest, 1.0) ** 0.75
            cells.append(
                f'<rect x="{x}" y="{y}" width="1" height="1" fill="{POSITIVE if value > 0 else NEGATIVE}" '
                f'fill-opacity="{opacity:.2f}"><title>{row_labels[y]} / {column_labels[x]}: {value:.3f}</title></rect>'
            )
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
    """The same colours for matplotlib, grey for NaN; they need vmin = -vmax."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("signed", (NEGATIVE, "white", POSITIVE)).with_extremes(bad="0.9")


def label(token: str) -> str:
    """A token in few characters, with signs for white space."""
    text = token.replace("\n", "\u21b5").replace("\t", "\u21e5").strip() or "\u2423"
    return text if len(text) <= _LONGEST_LABEL else text[: _LONGEST_LABEL - 1] + "\u2026"
