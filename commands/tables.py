"""Prints text tables to standard output with rich, which is imported only when it is needed."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence

COLOURS = {"ok": "green", "warning": "yellow", "error": "red", "skipped": "dim"}
_UNLIMITED = 10**6  # columns


def escape_unencodable() -> None:
    """Escape characters that standard output cannot encode, as standard error does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str] = ()
) -> Sequence[str]:
    """Print a table to standard output; its cells may have several lines.

    Return the columns that are omitted because the terminal is narrow.

    On a terminal, cells after the first are wrapped, and a status in the first column is colored.
    Otherwise, there are no colors, cells are neither wrapped nor cut, and the header is omitted
    if the first column has no name. Optional columns without a value in any row are omitted.

    Args:
        head: the column names.
        rows: the rows, with a cell for each column.
        optional: columns to omit on a narrow terminal, in this order.
    """
    if not rows:
        return ()
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    is_terminal = sys.stdout.isatty()
    unlimited = Console(color_system=None, width=_UNLIMITED)

    def without(omitted: Sequence[str]) -> Table:
        has_head = is_terminal or bool(head[0])
        table = Table(box=SIMPLE if is_terminal else None, pad_edge=False, show_header=has_head)
        kept = [index for index, name in enumerate(head) if name not in omitted]
        for index in kept:
            table.add_column(head[index], overflow="fold", no_wrap=index == 0)
        for row in rows:
            cells = [row[index] for index in kept]
            table.add_row(Text(cells[0], COLOURS.get(cells[0], "")), *map(Text, cells[1:]))
        return table

    values = {name: {row[index] for row in rows} for index, name in enumerate(head)}
    optional = sorted(optional, key=lambda name: values[name] != {"-"})  # empty columns first
    empty = [name for name in optional if values[name] == {"-"}]
    omitted, table = empty, without(empty)
    if is_terminal:
        console = Console()
        for count in range(len(empty) + 1, len(optional) + 1):
            if unlimited.measure(table).maximum > console.width:
                omitted = optional[:count]
                table = without(omitted)
        console.print(table)
        return omitted[len(empty) :]
    with unlimited.capture() as captured:
        unlimited.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())
    return ()


def when(seconds: float) -> str:
    """Format a time for a table; `-` if it is out of range."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "-"
