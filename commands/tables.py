"""Tables of text: drawn by rich on a terminal, plain columns elsewhere."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

COLOURS = {"ok": "green", "warning": "yellow", "error": "red", "skipped": "dim"}


def escape_unencodable() -> None:
    """Let standard output escape the characters that its encoding lacks, as standard error does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows to standard output; a status in the first column has its colour on a terminal.

    Args:
        head: the columns' names.
        rows: the cells; only those of the last column may have several lines.
    """
    if sys.stdout.isatty():
        _print_rich(head, rows)
        return
    columns = range(len(head) - 1)
    widths = [max(len(row[column]) for row in (head, *rows)) for column in columns]
    margin = " " * sum(width + 2 for width in widths)
    for row in rows:
        cells = "".join(f"{row[column]:<{widths[column]}}  " for column in columns)
        print((cells + row[-1].replace("\n", "\n" + margin)).rstrip())


def _print_rich(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*head, box=SIMPLE, pad_edge=False)
    for row in rows:
        table.add_row(Text(row[0], COLOURS.get(row[0], "")), *map(Text, row[1:]))
    Console().print(table)
