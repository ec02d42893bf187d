"""The lines of a run's record: JSON objects of these kinds, each with the format's version.

Two processes may write one record: a process that has replaced its launcher tells how it ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headway.contract.records import Figures, Kept
from headway.contract.typed import Misfit, parse, plain, read

VERSION = 1
MAX_BYTES = 2**20
"""Of one record."""
MAX_TEXT = 2**15
"""Characters of a report, and of the script's own text."""
_LARGEST = 2**63
_LARGEST_LOSS = 1e100  # of one that diverges; a larger one counts as not known
TAIL_LINES = 200
"""Kept of each rank."""
_MOST_ROWS = 600  # of figures, of all ranks together
_LEAST_ROWS = 8  # of each
_SUMMED = (  # figures of a row that stands for several
    *("num_steps", "seconds", "data_s", "forward_s", "backward_s", "sync_s", "save_s"),
    *("stolen_s", "samples"),
)


class Start(NamedTuple):
    """What was launched; secrets are masked."""

    began_at: float
    pid: int
    host: str
    folder: str
    kind: str  # as of a plan's program
    program: str
    script: str  # the path of its file; empty where that is not known
    arguments: tuple[str, ...]
    command: tuple[str, ...]  # the words after `headway launch`
    python: tuple[str, ...]
    settings: Mapping[str, str]  # their values as text
    origins: Mapping[str, str]  # where each setting that is no default came from
    environment: Mapping[str, str]  # the variables that the setting `env` gives
    machine: Mapping[str, str]
    variables: Mapping[str, str]  # of the environment, those that affect training
    others: Mapping[str, str]  # a digest of each other variable, by its name
    num_processes: int
    num_machines: int
    supervised: str | None = None  # why a launcher stayed; None: the script replaced it
    job: str = ""  # of a scheduler
    code: str = ""  # the copy that was run; program, script and arguments are as without it
    is_rank: bool | None = None  # the script found RANK, WORLD_SIZE, ...; None: it is not recorded


class Surroundings(NamedTuple):
    """What the run found when it began, and is not in the plan."""

    packages: Mapping[str, str]  # the versions of all that are installed
    sources: Mapping[str, str]  # a digest of each Python file beside the script and below
    text: str  # of the script
    inputs: Mapping[str, str]  # what each argument that is a path led to


class Commit(NamedTuple):
    """The state of the script's git repository."""

    root: str
    commit: str
    diff: str = ""  # of the files against the commit
    is_whole: bool = True  # `diff` was not cut
    untracked: tuple[str, ...] = ()  # files that git neither tracks nor ignores


class Restart(NamedTuple):
    """The end of an attempt, and the restart that followed."""

    time: float
    line: str  # as it was said


class Tail(NamedTuple):
    """The last lines of a rank."""

    rank: int
    lines: tuple[str, ...]


class End(NamedTuple):
    """How the run ended."""

    time: float
    exit_code: int | None  # None: it has called sys.exit, or it is not known
    report: str = ""
    step: int = 0  # the last one that any rank told of; 0: not known


class Row(NamedTuple):
    """Figures of one rank, of its own steps or of several such records together."""

    rank: int
    figures: Figures


Line = Start | Surroundings | Commit | Kept | Restart | Tail | End | Row
KINDS: Mapping[str, Any] = {
    kind.__name__: kind for kind in (Start, Surroundings, Commit, Kept, Restart, Tail, End, Row)
}


class Series:
    """Keeps the figures of all ranks over a run of any length, in a bounded number of rows.

    The older and the more, the more steps one row stands for. Sums stay exact: a row that stands
    for several has what they took together.
    """

    def __init__(self) -> None:
        self._rows: dict[int, list[Figures]] = {}

    def note(self, rank: int, figures: Figures) -> None:
        """Take the next figures of a rank; a loss that is no number counts as not known."""
        if figures.loss is not None and not abs(figures.loss) <= _LARGEST_LOSS:
            figures = figures._replace(loss=None)
        rows = self._rows.setdefault(rank, [])
        if not figures.num_steps:  # it says how far the rank is by now
            rows[-1:] = [_together([row, figures]) for row in rows[-1:]]
            return
        rows.append(figures)
        if len(rows) > 2 * max(_MOST_ROWS // (2 * len(self._rows)), _LEAST_ROWS):
            rows[:] = _halved(rows)

    def rows(self) -> list[tuple[int, Figures]]:
        """Return all rows, each with its rank."""
        kept = dict(self._rows)
        return [(rank, row) for rank in sorted(kept) for row in [*kept[rank]]]


def _halved(rows: Sequence[Figures]) -> list[Figures]:
    """Return half as many rows, each for two."""
    pairs = [rows[index : index + 2] for index in range(0, len(rows), 2)]
    return [_together(pair) for pair in pairs]


def _together(rows: Sequence[Figures]) -> Figures:
    """Return the row that stands for several, in their order."""
    last = rows[-1]
    devices = [row.device_bytes for row in rows if row.device_bytes is not None]
    losses = [row.loss for row in rows if row.loss is not None]
    return last._replace(
        **{name: sum(getattr(row, name) for row in rows) for name in _SUMMED},
        rss_bytes=max(row.rss_bytes for row in rows),
        device_bytes=max(devices, default=None),
        loss=losses[-1] if losses else None,
    )


class Unreadable(ValueError):
    """A record that cannot be read; the argument is a predicate, without the subject."""


class Record(NamedTuple):
    """A run, as far as its record goes."""

    name: str
    path: str  # of its folder
    start: Start
    surroundings: Surroundings | None = None
    commit: Commit | None = None
    kept: Sequence[Kept] = ()
    restarts: Sequence[Restart] = ()
    tails: Mapping[int, tuple[str, ...]] = {}
    end: End | None = None
    figures: Mapping[int, Sequence[Figures]] = {}
    damaged: int = 0  # lines that could not be read

    @property
    def has_ended_well(self) -> bool:
        return self.end is not None and self.end.exit_code == 0

    @property
    def num_steps(self) -> int:
        """The last step that any rank told of; 0: none has."""
        told = [rows[-1].step for rows in self.figures.values() if rows]
        return max([*told, self.end.step if self.end is not None else 0])

    @property
    def samples_per_s(self) -> float | None:
        """Of all ranks together, over all their steps; None where it is not known."""
        rates = []
        for rows in self.figures.values():
            seconds, samples = sum(row.seconds for row in rows), sum(row.samples for row in rows)
            if seconds > 0 and samples:
                rates.append(samples / seconds)
        return sum(rates) if rates else None


def lost(error: OSError) -> str:
    """Return the line that says that a run has no record, or not all of it."""
    return f"note: the record of this run is lost: {error.strerror} (--record off keeps none)"


def encode(line: Line) -> bytes:
    """Return a line of a record, with its end."""
    fields = {"record": type(line).__name__, "version": VERSION, **plain(line)}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def decode(line: bytes) -> Line:
    """Return what a line says; Unreadable if another version wrote it, ValueError if it is none."""
    try:
        fields = parse(line)
        kind, version = KINDS.get(fields.pop("record")), fields.pop("version")
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is no line of a record: {error}") from None
    if version != VERSION:
        raise Unreadable(f"has version {version!r:.20} of the format; this Headway reads {VERSION}")
    if kind is None:
        raise Misfit("", "is of no known kind")
    found: Line = read(kind, fields, limits=_limits)
    return found


def _limits(name: str, value: Any) -> str:
    """Say that a number is none that a run can have, if it is so."""
    is_number = isinstance(value, (int, float))
    largest = _LARGEST_LOSS if name.endswith("loss") else _LARGEST
    return "is out of range" if is_number and not abs(value) <= largest else ""


def record_of(name: str, path: str, data: bytes) -> Record:
    """Return the run whose record holds `data`, which may be cut off or damaged.

    Raises Unreadable where it does not say what was launched, or another version wrote it.
    """
    lines: list[Line] = []
    damaged = 0
    for text in data.split(b"\n"):
        if text.strip():
            try:
                lines.append(decode(text))
            except Unreadable:
                raise
            except (ValueError, RecursionError):
                damaged += 1
    one: dict[type, Any] = {type(line): line for line in lines}
    if Start not in one:
        raise Unreadable("does not say what was launched")
    figures: dict[int, list[Figures]] = {}
    for line in lines:
        if isinstance(line, Row):
            figures.setdefault(line.rank, []).append(line.figures)
    return Record(
        name=name,
        path=path,
        start=one[Start],
        surroundings=one.get(Surroundings),
        commit=one.get(Commit),
        kept=tuple(line for line in lines if isinstance(line, Kept)),
        restarts=tuple(line for line in lines if isinstance(line, Restart)),
        tails={line.rank: line.lines for line in lines if isinstance(line, Tail)},
        end=one.get(End),
        figures=figures,
        damaged=damaged,
    )
