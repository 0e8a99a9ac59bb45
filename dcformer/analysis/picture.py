"""Signed heat maps and graphs as SVG: blue above zero, orange below, which every eye tells apart, grey out of sight."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from torch import Tensor


POSITIVE, NEGATIVE, HIDDEN = "#2970e6", "#eb6112", "#9aa0a6"
_LONGEST_LABEL = 14
_WIDEST_CELL = 28  # pixels
_ARROWS_OF_A_HEAD = 3


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


def head_graph(lending: Tensor, title: str, strongest: float) -> str:
    """
    An SVG element of heads on a circle, each with arrows from the three heads of which it takes most.

    Args:
        lending (`Tensor`): (heads, heads) [from, to], shares; the diagonal is left out.
        title: What is drawn, for those who do not see it.
        strongest: Share of the broadest arrow.
    """
    count = len(lending)
    angles = [2 * math.pi * head / count for head in range(count)]
    size = min(0.7 * math.pi / count, 0.2)  # radius of a head's disc, where the circle's is 1
    arrows, discs = [], []
    for taker, angle in enumerate(angles):
        x, y = math.sin(angle), -math.cos(angle)
        shares = lending[:, taker].clone()
        shares[taker] = 0
        for share, lender in zip(*(each.tolist() for each in shares.topk(min(_ARROWS_OF_A_HEAD, count - 1)))):
            start = math.sin(angles[lender]), -math.cos(angles[lender])
            bend = 0.3 * (x + start[0]), 0.3 * (y + start[1])
            along = math.hypot(x - bend[0], y - bend[1])
            end = (x - (x - bend[0]) * 1.5 * size / along, y - (y - bend[1]) * 1.5 * size / along)  # short of the disc
            width = 0.5 * size * share / strongest
            arrows.append(
                f'<path d="M{start[0]:.3f} {start[1]:.3f}Q{bend[0]:.3f} {bend[1]:.3f} {end[0]:.3f} {end[1]:.3f}" '
                f'fill="none" stroke="{POSITIVE}" stroke-opacity=".7" stroke-width="{width:.4f}" '
                f'marker-end="url(#arrow)"><title>head {lender} lends to head {taker}: {share:.3f}</title></path>'
            )
        discs.append(
            f'<circle cx="{x:.3f}" cy="{y:.3f}" r="{size:.3f}" fill="white" stroke="currentColor" stroke-width=".01"/>'
            f'<text x="{x:.3f}" y="{y + 0.35 * size:.3f}" text-anchor="middle">{taker}</text>'
        )
    marker = (
        '<marker id="arrow" viewBox="0 0 4 4" refX="0" refY="2" markerWidth="3" markerHeight="3" orient="auto">'
        f'<path d="M0 0L4 2L0 4" fill="{POSITIVE}"/></marker>'
    )
    return (
        f'<svg role="img" aria-label="{html.escape(title)}" viewBox="-1.25 -1.25 2.5 2.5" font-size="{size:.3f}" '
        f'style="max-width: 320px">{marker}{"".join([*arrows, *discs])}</svg>'
    )


def label(token: str) -> str:
    """A token in few characters, with signs for white space."""
    text = token.replace("\n", "\u21b5").replace("\t", "\u21e5").strip() or "\u2423"
    return text if len(text) <= _LONGEST_LABEL else text[: _LONGEST_LABEL - 1] + "\u2026"
