"""Tables on the terminal, with rich where it is installed."""

from __future__ import annotations

from collections.abc import Sequence


try:
    from rich.console import Console
    from rich.table import Table
except ImportError:  # an optional dependency here; plain text serves as well
    Console = None  # type: ignore[assignment, misc]

_FILE_WIDTH = 180


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: the first column holds names, the others figures. Without rich, its cells divided by tabs."""
    if Console is None:
        print(*("\t".join(row) for row in (columns, *rows)), sep="\n")
        return
    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:  # a file has no width of its own, and rows should not break in it
        console = Console(markup=False, highlight=False, emoji=False, width=_FILE_WIDTH)
    console.print(table)
