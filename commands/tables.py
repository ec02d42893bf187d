"""Tables of text on standard output, by rich; it is imported only where a table is printed."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence

COLOURS = {"ok": "green", "warning": "yellow", "error": "red", "skipped": "dim"}
_UNLIMITED = 10**6  # columns
_SPACE = 3  # columns of a terminal's table between two of its own, and for both edges
_SHORTEST = 16  # columns that are left of a shortened cell


def escape_unencodable() -> None:
    """Let standard output escape the characters that its encoding lacks, as standard error does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, shortened: str = "") -> None:
    """Print rows, whose cells may have several lines, to standard output.

    On a terminal they have a head, wrap at its width, and a status in the first column has its
    colour; the cells of the column `shortened` are shortened in the middle, where that keeps the
    rows on one line each. Elsewhere there are neither head nor colours, and no cell is wrapped or
    cut.
    """
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    is_terminal = sys.stdout.isatty()
    if is_terminal and shortened:
        rows = _fitting([head, *rows], head.index(shortened), Console().width)[1:]
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


def _fitting(rows: Sequence[Sequence[str]], column: int, width: int) -> list[Sequence[str]]:
    """Return rows with the cells of one column as short as the width of the terminal asks for."""
    from rich.cells import cell_len

    widest = [max(map(cell_len, cells)) for cells in zip(*rows, strict=True)]
    others = sum(widest) - widest[column] + _SPACE * len(widest)
    room = max(width - others, _SHORTEST)
    return [(*row[:column], _shortened(row[column], room), *row[column + 1 :]) for row in rows]


def _shortened(text: str, room: int) -> str:
    """Return a text without its middle, where it takes more columns than there is room for."""
    from rich.cells import cell_len

    whole, num_left = text, len(text)
    while cell_len(text) > room:
        num_left -= 1
        text = f"{whole[: num_left // 2]}…{whole[len(whole) - (num_left - num_left // 2) :]}"
    return text


def when(seconds: float) -> str:
    """Return a time as a table has it, `-` for one that no clock shows."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "-"
