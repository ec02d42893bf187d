"""`headway top [RUN]`: a live view of running launches and their ranks, with the slow rank."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from headway.commands.flags import Parser, usage_error
from headway.commands.tables import print_table, when
from headway.ipc.stderr import shown, size
from headway.launcher.diagnosis.run_socket import ActiveRun, request_stats
from headway.launcher.processes.gpu_claims import waiting_launches

if TYPE_CHECKING:
    from rich.console import RenderableType

HEAD = ("pid", "program", "ranks", "since")
"""Columns of the table of launches."""

_EVERY_S = 1.0  # between redraws; the ranks report once a second
_QUIT = (b"q", b"")  # b"": the terminal has been closed
_NO_STEP = "no rank has reported an optimizer step yet"
_UNKNOWN = "-"
_STALE_S = 10.0  # a rank that has not reported a step for this long is marked

_RANK_HEAD = (
    *("rank", "machine", "step", "ms a step", "compute", "data", "sync", "save", "samples/s"),
    *("memory", "device", "last line"),
)
_NARROW_HEAD = (
    *("rank", "machine", "step", "ms a step", "data", "sync", "samples/s", "last line"),
)
_WIDE = 120  # terminal columns required for all of them
_TEXTS = ("program", "ranks", "since", "machine", "last line")  # the other columns are numbers


class Watched(NamedTuple):
    run: ActiveRun
    ranks: list[Mapping[str, Any]]
    slowest: Mapping[str, Any] | None
    words: list[str]

    def to_json(self) -> dict[str, Any]:
        return {**self.run._asdict(), "ranks": self.ranks, "slowest": self.slowest}


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "top",
        "Show your running launches on this machine, and the step, time per phase, memory and last "
        "line of each rank of a launch, until you press q or Ctrl-C. Phases of a "
        "step are shown for scripts that use Accelerator. A single process has no launcher, and "
        "is shown only with `headway launch --supervise`.",
        usage="headway top [PID] [--json]",
        appendix="\nPID: the process ID of a launch, as in the table (default: the newest)\n",
    )
    parser.flag(
        "--json", help="print one JSON object: {runs}, each with {ranks, slowest}; {waiting}"
    )
    parsed, chosen = parser.parse_flag(argv, "run")
    runs = _chosen(chosen)
    if parsed.json:
        found = {"runs": [run.to_json() for run in runs], "waiting": waiting_launches()}
        print(json.dumps(found, indent=2))
    elif sys.stdout.isatty():
        watch(chosen)
    else:
        for part in _parts(runs, chosen):
            if isinstance(part, str):
                print(part)
            else:
                print_table(part.head, part.rows)
    return 0


def watched() -> list[Watched]:
    """Return this user's runs on this machine, oldest first."""
    return [Watched(run, **stats) for run, stats in request_stats()]


def _chosen(word: str | None) -> list[Watched]:
    """Return the run with the process ID `word`; all runs if `word` is None."""
    runs = watched()
    if word is None:
        return runs
    found = [run for run in runs if str(run.run.pid) == word]
    if not found:
        raise usage_error(
            f"{word!r} is not the process ID of one of your running launches",
            fix="`headway top` lists them",
        )
    return found


def row_of(run: ActiveRun) -> tuple[str, ...]:
    if run.is_suspended:
        return str(run.pid), "-", "its launcher is suspended", when(run.began_at)
    return str(run.pid), shown(run.program), run.ranks, when(run.began_at)


class _Table(NamedTuple):
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    styles: Sequence[str] = ()  # one per row


def _parts(runs: Sequence[Watched], word: str | None) -> Iterator[_Table | str]:
    """Yield a table of all runs, and a table of the ranks of the chosen or newest run."""
    for number, process in enumerate(waiting_launches(), start=1):
        yield f"waiting for idle GPUs: {number}. {process}"
    if not runs:
        yield "you have no running launches on this machine"
        return
    yield _Table(HEAD, [row_of(run.run) for run in runs])
    newest = next((run for run in reversed(runs) if run.ranks), runs[-1])
    chosen = newest
    if word is not None:
        (chosen,) = (run for run in runs if str(run.run.pid) == word)
    elif len(runs) > 1:
        yield f"showing the ranks of {newest.run.pid}; `headway top PID` shows another launch"
    if not chosen.ranks:
        yield _NO_STEP
        return
    slow = None if chosen.slowest is None else chosen.slowest["rank"]
    styles = [
        "red" if rank["is_lost"] else "yellow" if rank["rank"] == slow else ""
        for rank in chosen.ranks
    ]
    yield _Table(_RANK_HEAD, [cells_of(rank) for rank in chosen.ranks], styles)
    yield from chosen.words


def watch(word: str | None) -> None:
    """Show the live screen until q or Ctrl-C is pressed, or the run with the ID `word` ends."""
    from rich.console import Console
    from rich.live import Live

    with suppress(KeyboardInterrupt), _keys() as keys:
        with Live(console=Console(), screen=True, auto_refresh=False) as live:
            runs = watched()
            while word is None or any(str(run.run.pid) == word for run in runs):
                live.update(screen_of(runs, word, live.console.width), refresh=True)
                if select.select(keys, [], [], _EVERY_S)[0] and os.read(keys[0], 1) in _QUIT:
                    return
                runs = watched()
        print(f"{word} has ended")


@contextmanager
def _keys() -> Iterator[list[int]]:
    """Yield the terminal's descriptor in a list, which is empty if stdin is not a terminal."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield []
        return
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    tty.setcbreak(keys, termios.TCSANOW)
    try:
        yield [keys]
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def screen_of(runs: Sequence[Watched], word: str | None, width: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    return Group(
        *(
            Text(part) if isinstance(part, str) else _drawn(part, width)
            for part in _parts(runs, word)
        )
    )


def _drawn(part: _Table, width: int) -> RenderableType:
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    head, rows, _ = part if part.head == HEAD else _fitting(part.rows, width)
    table = Table(box=SIMPLE, pad_edge=False)
    for name in head:
        table.add_column(
            name,
            no_wrap=name != head[-1],
            overflow="ellipsis",
            justify="left" if name in _TEXTS else "right",
        )
    for row, style in zip_longest(rows, part.styles, fillvalue=""):
        *cells, last = map(Text, row)
        last.no_wrap = True  # cut if the terminal is too narrow, unlike the others
        table.add_row(*cells, last, style=str(style))
    return table


def _fitting(rows: Sequence[Sequence[str]], width: int) -> _Table:
    columns = {name: cells for name, *cells in zip(_RANK_HEAD, *rows, strict=True)}
    head = [*(_RANK_HEAD if width >= _WIDE else _NARROW_HEAD)]
    if len({*columns["machine"]}) == 1:
        head.remove("machine")
    return _Table(head, [*zip(*(columns[name] for name in head), strict=True)])


def cells_of(rank: Mapping[str, Any]) -> tuple[str, ...]:
    step, total, age_s = rank["step"], rank["total"], rank["age_s"]
    quiet = f"(no step for {age_s:.0f} s) " if age_s > _STALE_S else ""
    return (
        str(rank["rank"]),
        rank["host"] or str(rank["machine"]),
        f"{step}/{total}" if total else f"{step}",
        _number(rank["step_ms"]),
        *(_share(rank[f"{name}_share"]) for name in ("compute", "data", "sync", "save")),
        _number(rank["samples_per_s"]),
        *(size(n) if n else _UNKNOWN for n in (rank["rss_bytes"], rank["device_bytes"])),
        ("(machine lost) " if rank["is_lost"] else quiet) + shown(rank["last_line"].expandtabs()),
    )


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _share(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.0%}"
