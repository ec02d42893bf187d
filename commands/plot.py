"""`headway plot RUN...`: draw the metrics of runs that the jsonl tracker wrote."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from headway.commands.flags import Parser
from headway.commands.plotting import charts_of, draw_chart, read_runs, save_picture
from headway.contract.notes import say
from headway.errors import MachineError

RUN = (
    'RUN: a file that Accelerator(log_with="jsonl") wrote, or a folder, which means its newest one;'
    "\nseveral are compared."
)


def main(argv: Sequence[str]) -> int:
    """Run `headway plot` with these words and return the exit code."""
    parser = make_parser()
    parsed, words = parser.parse_words(argv)
    if not words:
        parser.error("headway plot requires a run: a file or a folder")
    _require("plotext" if parsed.output is None else "matplotlib")
    runs = read_runs(words)
    wanted = [name.strip() for name in (parsed.metrics or "").split(",") if name.strip()]
    charts = charts_of(runs, wanted)
    for run in runs:
        if run.damaged_lines:
            say(f"note: {run.damaged_lines} damaged lines of {run.path} are left out")
    if parsed.output is not None:
        title = ", ".join(dict.fromkeys(run.project for run in runs))
        save_picture(charts, title, Path(parsed.output))
        print(parsed.output)
        return 0
    width, encoding = shutil.get_terminal_size().columns, sys.stdout.encoding or "utf-8"
    print(*(str(run.path) for run in runs), sep="\n")
    for chart in charts:
        print(f"\n{draw_chart(chart, width, encoding)}")
    return 0


def make_parser() -> Parser:
    """Return the parser of the command's flags."""
    parser = Parser(
        "plot",
        "Draw the metrics of runs that the jsonl tracker wrote: in the terminal, or as a picture. "
        "It needs the extra: pip install 'headway[plot]'.",
        usage="headway plot [--metrics NAMES] [--output FILE] RUN ...",
        appendix=f"\n{RUN}\n",
    )
    parser.flag(
        "--metrics",
        metavar="NAMES",
        help="the metrics to draw, separated by commas; a name may have wildcards: 'train/*'",
    )
    parser.flag(
        "--output",
        metavar="FILE",
        help="write a picture instead: its kind is that of the name, such as .png or .svg",
    )
    return parser


def _require(package: str) -> None:
    if find_spec(package) is None:
        raise MachineError(
            f"`headway plot` draws with {package}, which is not installed",
            where="this Python's packages",
            fix=f"`{sys.executable} -m pip install 'headway[plot]'`",
        )
