"""Draw docs/conversation.svg: `headway config` on a recorded server with eight GPUs.

    python -m docs.conversation      from the root of the repository; needs `.[test]`

The program runs on a pty. The picture shows its screen with an open menu, followed by the rest of
its output.
"""

from __future__ import annotations

import html
import os
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.terminal import Terminal

FILE = Path(__file__).with_name("conversation.svg")
ROWS, COLUMNS = 34, 100
CELL_WIDTH, CELL_HEIGHT, MARGIN = 8.4, 18, 14
COLOURS = {"default": "#d8dee9", "cyan": "#6fc3df", "brown": "#e5c07b", "green": "#98c379"}
OPEN_MENU = "❯ bf16"
KEYS = [  # text to wait for, and keys to press then
    ("❯ cuda", "\r"),
    ("[8]", "9\r"),
    ("Answer again", ""),
    ("[8]", "\r"),
    (OPEN_MENU, "\r"),
    ("❯ user", "\r"),
    ("❯ no", "\r"),
    ("❯ write", "\r"),
]


def picture() -> str:
    """Run the conversation and return it as an SVG."""
    title = "headway config on a server with eight GPUs"
    return draw(title, COLUMNS, ["$ headway config", *run_conversation()])


def run_conversation() -> list[str]:
    """Run the conversation in an empty home folder and return the lines of the picture."""
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"HOME": home, "XDG_CONFIG_HOME": ""}
        os.chdir(home)
        with Terminal("gpu_8_h100", "config", rows=ROWS, columns=COLUMNS) as terminal:
            for text, keys in KEYS:
                terminal.wait_for(text)
                if text == OPEN_MENU:
                    terminal.wait_for("half the memory; a small range")  # the menu's last line
                    lines = lines_of(terminal)
                terminal.press(keys)
            terminal.exit_code()
        at = next(row for row, line in enumerate(terminal.screen.display) if "precision?" in line)
        return lines + lines_of(terminal)[at:]


def lines_of(terminal: Terminal) -> list[str]:
    """Return the current lines of a terminal as SVG."""
    rows = terminal.text.count("\n") + 1
    columns = terminal.screen.columns
    return ["".join(_spans(terminal.screen.buffer[row], columns)) for row in range(rows)]


def draw(title: str, columns: int, lines: list[str]) -> str:
    """Return an SVG of a terminal with these lines."""
    width, height = columns * CELL_WIDTH + 2 * MARGIN, len(lines) * CELL_HEIGHT + 2 * MARGIN
    texts = (
        f'<text x="{MARGIN}" y="{MARGIN + (row + 0.75) * CELL_HEIGHT:g}">{line}</text>'
        for row, line in enumerate(lines)
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">',
            f"<title>{title}</title><style>text{{white-space:pre}}</style>",
            '<rect width="100%" height="100%" rx="8" fill="#20242c"/>',
            f'<g fill="{COLOURS["default"]}" xml:space="preserve">',
            *texts,
            "</g>",
            "</svg>\n",
        ]
    )


def _spans(cells: Any, columns: int) -> Iterator[str]:
    """Yield the text of a line in spans of one style."""
    last = max((column for column in range(columns) if cells[column].data != " "), default=-1)
    shown = [cells[column] for column in range(last + 1)]
    for (colour, is_bold), run in groupby(shown, key=lambda cell: (cell.fg, cell.bold)):
        text = html.escape("".join(cell.data for cell in run))
        fill = COLOURS.get(colour, f"#{colour}")
        weight = ' font-weight="bold"' if is_bold else ""
        yield f'<tspan fill="{fill}"{weight}>{text}</tspan>' if text.strip() else text


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
