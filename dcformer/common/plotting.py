"""The style of all plots, readable without colour; the same data give the same file."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .files import write_atomically
from .optional import import_optional


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_METADATA = {".png": None, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # no date: the same file each time


@contextlib.contextmanager
def picture(path: str | os.PathLike[str], figsize: tuple[float, float], extra: str, *endings: str) -> Iterator[Figure]:
    """
    Write what the block draws on the figure, of this width and height in inches, also with further endings such as
    ".png"; `extra` installs matplotlib. ValueError unless the path ends in `.png`, `.svg` or `.pdf`.
    """
    path = Path(path)
    if path.suffix.lower() not in _METADATA:
        raise ValueError(f"Cannot write a plot to {str(path)!r}: its name must end in {', '.join(_METADATA)}.")
    matplotlib = import_optional("matplotlib", "A plot", extra)
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 10, "svg.hashsalt": "dcformer", "svg.fonttype": "none"}):
        figure = Figure(figsize=figsize, layout="constrained")
        yield figure
        for file in (path, *map(path.with_suffix, endings)):
            suffix, content = file.suffix.lower(), io.BytesIO()
            figure.savefig(content, format=suffix[1:], dpi=150, metadata=_METADATA[suffix])
            write_atomically(file, content.getvalue())


def draw_rows(axis: Axes, names: Sequence[str]) -> None:
    """Name the rows 0, 1, ... of an axis from top to bottom, every other one shaded."""
    for row in range(1, len(names), 2):
        axis.axhspan(row - 0.5, row + 0.5, color="0.94", zorder=0)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    draw_grid(axis, "x")


def draw_grid(axis: Axes, which: Literal["both", "x", "y"] = "both") -> None:
    """Draw grid lines behind the data."""
    axis.grid(axis=which, color="0.85", linewidth=0.6, zorder=0)
    axis.set_axisbelow(True)
