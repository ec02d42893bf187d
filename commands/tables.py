"""Tables of text on standard output, by rich; it is imported only where a table is printed."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence

COLOURS = {"ok": "green", "warning": "yellow", "error": "red", "skipped": "dim"}
_UNLIMITED = 10**6  # columns


def escape_unencodable() -> None:
    """Escape the characters that standard output's encoding lacks, as standard error does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str] = ()
) -> None:
    """Print rows, whose cells may have several lines, to standard output.

    On a terminal cells but the first wrap at its width, and a status in the first column is
    coloured. Elsewhere there are no colours, no cell is wrapped or cut, and a table whose first
    column has no name has no head.

    Args:
        head: the names of the columns.
        rows: a cell for each column.
        optional: columns that a narrow terminal does without, the first one first.
    """
    if not rows:
        return
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    is_terminal = sys.stdout.isatty()
    unlimited = Console(color_system=None, width=_UNLIMITED)

    def without(reread: Sequence[str]) -> Table:
        has_head = is_terminal or bool(head[0])
        table = Table(box=SIMPLE if is_terminal else None, pad_edge=False, show_header=has_head)
        kept = [index for index, name in enumerate(head) if name not in reread]
        for index in kept:
            table.add_column(head[index], overflow="fold", no_wrap=index == 0)
        for row in rows:
            cells = [row[index] for index in kept]
            table.add_row(Text(cells[0], COLOURS.get(cells[0], "")), *map(Text, cells[1:]))
        return table

    table = without(())
    if is_terminal:
        console = Console()
        for count in range(1, len(optional) + 1):
            if unlimited.measure(table).maximum > console.width:
                table = without(optional[:count])
        console.print(table)
        return
    with unlimited.capture() as captured:
        unlimited.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())


def when(seconds: float) -> str:
    """Return a time for a table; `-` if it is out of range."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "-"
