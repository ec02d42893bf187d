"""`headway top [RUN]`: what the ranks of running launches do, live, and which one is slow."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headway.commands.flags import Parser, bad_words
from headway.commands.ps import HEAD, print_runs, row_of, run_of
from headway.commands.tables import print_table
from headway.contract.figures_file import Alone, list_alone
from headway.contract.records import shown
from headway.contract.sizes import size
from headway.launcher.diagnosis.run_socket import Run, ask_for_figures
from headway.launcher.figures.figures import RunFigures

if TYPE_CHECKING:
    from rich.console import RenderableType

_EVERY_S = 1.0
_NO_STEP = "no rank has told of an optimizer step yet"
_UNKNOWN = "-"
_MOST_NAMED = 5  # launches, in a line
_STALE_S = 10.0  # a rank that has not told of a step for so long is marked

_RANK_HEAD = (
    *("rank", "machine", "step", "ms a step", "compute", "data", "sync", "save", "samples/s"),
    *("memory", "device", "last line"),
)
_FIRST_TO_GO = ("device", "save", "memory", "compute", "samples/s", "machine", "sync", "data")
_TEXTS = ("program", "ranks", "since", "machine", "last line")  # the other columns are numbers
_SPACE, _LAST_LINE = 3, 20  # columns of the screen: between two of the table, and for its last one


class Watched(NamedTuple):
    """A run, and what its ranks have told."""

    run: Run
    ranks: list[Mapping[str, Any]]
    slowest: Mapping[str, Any] | None
    words: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return it as `--json` prints it."""
        return {**self.run._asdict(), "ranks": self.ranks, "slowest": self.slowest}


def main(argv: Sequence[str]) -> int:
    """Run `headway top` with these words and return the exit code."""
    parser = Parser(
        "top",
        "Show your running launches on this machine, and one row for each rank of one of them: "
        "its step, where its time goes, its memory and its last line, each second until Ctrl-C. "
        "Where the time of a step goes is known of scripts that use an Accelerator.",
        usage="headway top [RUN] [--json]",
        appendix="\nRUN: the process id of a launch, as in `headway ps`; by default the newest\n",
    )
    parser.flag("--json", help="print one JSON object, once: {runs}, each with {ranks, slowest}")
    parsed, words = parser.parse_words(argv)
    if len(words) > 1:
        parser.error(f"headway top takes one run, and got {len(words)}")
    chosen = words[0] if words else None
    if parsed.json:
        print(json.dumps({"runs": [one.to_json() for one in _chosen(chosen)]}, indent=2))
    elif sys.stdout.isatty():
        _watch(chosen)
    else:
        _print_once(_chosen(chosen))
    return 0


def watched() -> list[Watched]:
    """Return this user's runs on this machine, the oldest first."""
    found = [
        Watched(
            run,
            list(figures.get("ranks", ())),
            figures.get("slowest"),
            list(figures.get("words", ())),
        )
        for run, figures in ask_for_figures()
    ]
    found += [_watched_alone(one) for one in list_alone()]
    return sorted(found, key=lambda one: one.run.began_at)


def _watched_alone(alone: Alone) -> Watched:
    figures = RunFigures()
    if alone.figures is not None:
        figures.begin_attempt(1)
        figures.note(0, alone.figures, age_s=max(time.time() - alone.figures.time, 0.0))
    told = figures.to_json(lambda _: "")
    return Watched(run_of(alone), told["ranks"], None, told["words"])


def _chosen(word: str | None) -> list[Watched]:
    """Return the run that a word names alone; all without one."""
    runs = watched()
    if word is None:
        return runs
    found = [one for one in runs if str(one.run.pid) == word]
    if not found:
        raise bad_words(
            f"{word!r} is not the process id of a running launch of yours",
            fix="`headway ps` lists them",
        )
    return found


def _print_once(runs: Sequence[Watched]) -> None:
    print_runs([one.run for one in runs])
    if not runs:
        return
    print()
    newest = _newest(runs)
    if len(runs) > 1:
        print(_others(runs, newest))
    if not newest.ranks:
        print(_NO_STEP)
        return
    print_table(_RANK_HEAD, [cells_of(rank) for rank in newest.ranks])
    for words in newest.words:
        print(words)


def _newest(runs: Sequence[Watched]) -> Watched:
    """Return the newest run of which a rank has told; if there is none, the newest."""
    return next((one for one in reversed(runs) if one.ranks), runs[-1])


def _others(runs: Sequence[Watched], chosen: Watched) -> str:
    """Return whose ranks are shown where nobody has chosen, and which launches have others."""
    others = [str(one.run.pid) for one in runs if one is not chosen]
    more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
    return (
        f"these are the ranks of {chosen.run.pid}; `headway top RUN` shows those of "
        f"{', '.join(others[:_MOST_NAMED])}{more}"
    )


def _watch(word: str | None) -> None:
    from rich.console import Console
    from rich.live import Live

    _chosen(word)  # raises before the screen is taken
    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(screen_of(watched(), word, live.console.width), refresh=True)
                time.sleep(_EVERY_S)
        except KeyboardInterrupt:
            pass


def screen_of(runs: Sequence[Watched], word: str | None, width: int) -> RenderableType:
    """Return all runs, and below them the ranks of the chosen one, for a screen of that width."""
    from rich.console import Group
    from rich.text import Text

    if not runs:
        return Text("no launch of yours runs on this machine")
    chosen = next((one for one in runs if str(one.run.pid) == word), None)
    if word is None:
        chosen = _newest(runs)
    parts: list[RenderableType] = [_table(HEAD, [row_of(one.run) for one in runs])]
    if word is None and chosen is not None and len(runs) > 1:
        parts.append(Text(_others(runs, chosen)))
    if chosen is None:
        parts.append(Text(f"{word} has ended"))
        return Group(*parts)
    if not chosen.ranks:
        parts.append(Text(_NO_STEP))
        return Group(*parts)
    slow = None if chosen.slowest is None else chosen.slowest.get("rank")
    styles = [
        "red" if rank.get("is_lost") else "yellow" if rank.get("rank") == slow else ""
        for rank in chosen.ranks
    ]
    head, rows = _narrowed([cells_of(rank) for rank in chosen.ranks], width - _LAST_LINE)
    parts.append(_table(head, rows, styles))
    parts += [Text(words) for words in chosen.words]
    return Group(*parts)


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()
) -> RenderableType:
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, pad_edge=False)
    for name in head:
        table.add_column(
            name,
            no_wrap=name != head[-1],
            overflow="ellipsis",
            justify="left" if name in _TEXTS else "right",
        )
    for number, row in enumerate(rows):
        *cells, last = map(Text, row)
        last.no_wrap = True  # it is cut where the terminal is too narrow, and the others are whole
        table.add_row(*cells, last, style=styles[number] if styles else "")
    return table


def _narrowed(
    rows: Sequence[Sequence[str]], width: int
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return a head and rows of which all columns before the last one are whole in `width`.

    Those that matter less are left out; so is the memory of devices that have none of their own,
    and the machine, where there is one.
    """
    columns = {name: cells for name, *cells in zip(_RANK_HEAD, *rows, strict=True)}
    if {*columns["device"]} == {_UNKNOWN}:
        del columns["device"]
    if len({*columns["machine"]}) == 1:
        del columns["machine"]
    for name in _FIRST_TO_GO:
        *widths, _ = (_SPACE + max(map(len, (one, *cells))) for one, cells in columns.items())
        if sum(widths) <= width:
            break
        columns.pop(name, None)
    return [*columns], [*zip(*columns.values(), strict=True)]


def cells_of(rank: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a rank; what a launcher of another version does not tell is `-`."""
    step, total = rank.get("step"), rank.get("total")
    age_s = rank.get("age_s") or 0.0
    quiet = f"(no step for {age_s:.0f} s) " if age_s > _STALE_S else ""
    memory = (rank.get("rss_bytes"), rank.get("device_bytes"))
    state = "(machine lost) " if rank.get("is_lost") else quiet
    return (
        str(rank.get("rank", _UNKNOWN)),
        rank.get("host") or str(rank.get("machine", _UNKNOWN)),
        f"{step}/{total}" if total else f"{step}",
        _number(rank.get("step_ms")),
        *(_share(rank.get(f"{name}_share")) for name in ("compute", "data", "sync", "save")),
        _number(rank.get("samples_per_s")),
        *(size(one) if one else _UNKNOWN for one in memory),
        state + shown(str(rank.get("last_line", ""))),
    )


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _share(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.0%}"
