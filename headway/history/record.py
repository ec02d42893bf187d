"""The record of a run, as its file holds it, and the records that there are."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from headway.contract.paths import is_absent
from headway.contract.records import Figures, Kept
from headway.contract.typed import parse, read
from headway.errors import ConfigError, did_you_mean
from headway.history.beginning import Launch
from headway.history.code import Commit
from headway.history.store import FILE, FORMAT, names_in, runs_folder

_FIX = "`headway runs` lists the runs that have a record"

MAX_TEXT = 2**15
"""Characters of a report."""
_LARGEST_LOSS = 1e100  # of one that diverges; a larger one counts as not known
_MOST_ROWS, _LEAST_ROWS = 600, 4  # of figures: of all ranks together, and of each
_SUMMED = (  # figures of a row that stands for several
    *("num_steps", "seconds", "data_s", "forward_s", "backward_s", "sync_s", "save_s"),
    *("stolen_s", "samples"),
)


class Outcome(NamedTuple):
    time: float
    exit_code: int | None  # None: a single process has ended by itself, with an unknown code
    report: str
    step: int  # the last one that any rank reported; 0: not known


class RankRecord(NamedTuple):
    rank: int
    figures: tuple[Figures, ...]
    lines: tuple[str, ...]  # the last ones that it printed


class RunRecord(NamedTuple):
    path: str  # of the record's folder
    start: Launch
    packages: Mapping[str, str]  # the versions of all that were installed
    commit: Commit | None  # None: the script is in no git repository
    kept: tuple[Kept, ...]
    ranks: tuple[RankRecord, ...]
    end: Outcome | None

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def has_ended_well(self) -> bool:
        return self.end is not None and self.end.exit_code == 0

    @property
    def figures(self) -> Mapping[int, Sequence[Figures]]:
        return {one.rank: one.figures for one in self.ranks if one.figures}

    @property
    def tails(self) -> Mapping[int, Sequence[str]]:
        return {one.rank: one.lines for one in self.ranks if one.lines}

    @property
    def num_steps(self) -> int:
        """The last step that any rank reported, or 0."""
        steps = [rows[-1].step for rows in self.figures.values()]
        return max([*steps, self.end.step if self.end is not None else 0])

    @property
    def samples_per_s(self) -> float | None:
        """Of all ranks together, over all their steps; None if unknown."""
        rates = []
        for rows in self.figures.values():
            seconds, samples = sum(row.seconds for row in rows), sum(row.samples for row in rows)
            if seconds > 0 and samples:
                rates.append(samples / seconds)
        return sum(rates) if rates else None


class Series:
    """Keeps the figures of all ranks over a run of any length, in a bounded number of rows.

    Rows merge several steps, more as the run grows. Sums stay exact.
    """

    def __init__(self) -> None:
        self._rows: dict[int, list[Figures]] = {}

    def note(self, rank: int, figures: Figures) -> None:
        """Add figures of a rank; a loss that is not a number is stored as unknown."""
        if figures.loss is not None and not abs(figures.loss) <= _LARGEST_LOSS:
            figures = figures._replace(loss=None)
        rows = self._rows.setdefault(rank, [])
        if not figures.num_steps:  # it reports how far the rank is by now
            rows[-1:] = [_together([row, figures]) for row in rows[-1:]]
            return
        rows.append(figures)
        if len(rows) > 2 * max(_MOST_ROWS // (2 * len(self._rows)), _LEAST_ROWS):
            pairs = [rows[index : index + 2] for index in range(0, len(rows), 2)]
            rows[:] = map(_together, pairs)

    def ranks(self, tails: Mapping[int, Sequence[str]]) -> tuple[RankRecord, ...]:
        rows = {rank: tuple(kept) for rank, kept in self._rows.copy().items()}
        return tuple(
            RankRecord(rank, rows.get(rank, ()), tuple(tails.get(rank, ())))
            for rank in sorted(rows.keys() | tails.keys())
        )


def _together(rows: Sequence[Figures]) -> Figures:
    """Return several consecutive rows merged into one."""
    last = rows[-1]
    devices = [row.device_bytes for row in rows if row.device_bytes is not None]
    losses = [row.loss for row in rows if row.loss is not None]
    return last._replace(
        **{name: sum(getattr(row, name) for row in rows) for name in _SUMMED},
        rss_bytes=max(row.rss_bytes for row in rows),
        device_bytes=max(devices, default=None),
        loss=losses[-1] if losses else None,
    )


def decode(text: bytes) -> RunRecord:
    """Return the record that a text holds, or raise ValueError with a predicate."""
    try:
        fields = parse(text)
        found = fields.pop("format")
        if found == FORMAT:
            return read(RunRecord, fields)
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"is damaged: {error}") from None
    raise ValueError(f"has format {found!r:.20}, and this Headway reads {FORMAT}")


def is_running(record: RunRecord) -> bool:
    """Return whether a run has not ended, as far as this machine can check."""
    start = record.start
    if record.end is not None or start.host != os.uname().nodename:
        return False
    import psutil

    with suppress(psutil.Error):
        return bool(psutil.Process(start.pid).create_time() <= start.began_at + 1)
    return False


def read_record(path: str) -> RunRecord:
    """Return the record in a run's folder; raises ConfigError if it cannot be read."""
    try:
        # a pipe without a writer is empty: nothing waits
        with open(os.open(os.path.join(path, FILE), os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            return decode(file.read())._replace(path=path)
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else error
        what = f"the record of run {os.path.basename(path)} {reason}"
        raise ConfigError(what, where=path, fix=f"remove that folder; {_FIX}") from None


def read_all() -> tuple[list[RunRecord], list[str]]:
    """Return all runs, the newest last, and the errors of unreadable ones."""
    folder = runs_folder()
    found, refused = [], []
    for name in _names_in(folder):
        try:
            found.append(read_record(os.path.join(folder, name)))
        except ConfigError as error:
            if not is_absent(os.path.join(folder, name, FILE)):  # else it has just begun
                refused.append(error.problems[0].what)
    return sorted(found, key=lambda one: (one.start.began_at, one.name)), refused


def _names_in(folder: str) -> list[str]:
    try:
        return names_in(folder)
    except OSError as error:
        what = f"the records of runs cannot be read: {error.strerror}"
        raise ConfigError(what, where=folder, fix="see that you may read the folder") from None


def find(word: str | None) -> RunRecord:
    """Return the run with a name, or its start or end; None: the newest.

    Raises ConfigError if no run or several match, or its record cannot be read.
    """
    folder = runs_folder()
    names = _names_in(folder)
    if word is None:
        found, _ = read_all()
        if not found:
            fix = "`headway launch` leaves one of each run, unless the setting record is off"
            raise ConfigError("no run has a record that can be read", where=folder, fix=fix)
        return found[-1]
    meant = [name for name in names if word and (name.startswith(word) or name.endswith(word))]
    if len(meant) == 1:
        return read_record(os.path.join(folder, meant[0]))
    what = f"{word!r} may mean {len(meant)} runs: {', '.join(meant[-5:])}"
    if not meant:
        close = did_you_mean(word, names)
        what = f"no run is called {word!r}" + (f"; did you mean {close!r}?" if close else "")
    raise ConfigError(what, where="the command line", fix=_FIX)


def last_good(record: RunRecord, others: Sequence[RunRecord]) -> RunRecord | None:
    """Return the last other run of the same script that succeeded before this one started."""
    good = [
        one
        for one in others
        if one.has_ended_well
        and _script(one) == _script(record)
        and one.start.began_at < record.start.began_at
    ]
    return good[-1] if good else None


def _script(record: RunRecord) -> str:
    return record.start.script or record.start.program
