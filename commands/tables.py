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


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows, whose cells may have several lines, to standard output.

    On a terminal they have a head, wrap at its width, and a status in the first column is
    coloured. Elsewhere there are neither head nor colours, and no cell is wrapped or cut.
    """
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    is_terminal = sys.stdout.isatty()
    table = Table(box=SIMPLE if is_terminal else None, pad_edge=False, show_header=is_terminal)
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(Text(row[0], COLOURS.get(row[0], "")), *map(Text, row[1:]))
    if is_terminal:
        Console().print(table)
        return
    console = Console(color_system=None, width=_UNLIMITED)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())


def when(seconds: float) -> str:
    """Return a time for a table; `-` if it is out of range."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "-"
