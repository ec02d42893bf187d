"""Records of runs: their contents, the thread that writes them, and lookup."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from headway.errors import Code, ConfigError, suggestion
from headway.history import store
from headway.history.attempts import Attempt, shares
from headway.history.store import FILE, FORMAT, Commit, Launch, names_in, runs_folder
from headway.ipc.paths import is_absent, read_plain
from headway.ipc.records import DURATIONS, OutputPath, StepStats
from headway.ipc.run_contract import epoch_time
from headway.ipc.secrets import masked_text
from headway.ipc.stderr import log
from headway.ipc.typed import SchemaError, plain, read

_FIX = "`headway runs` lists all recorded runs"

MAX_TEXT = 2**15
"""Maximum number of characters in a report."""
_LARGEST_LOSS = 1e100  # larger losses are stored as None
_MOST_ROWS, _LEAST_ROWS = 600, 4  # rows of stats: maximum in total, minimum per rank
_SUMMED = ("num_steps", "samples", *DURATIONS)  # fields to add up when rows are merged

TAIL_LINES = 200
"""Output lines stored per rank."""
_EVERY_S = 60.0  # between writes during the run; a killed launcher loses this much
_CLOSE_WITHIN_S = 2.0  # for the last write, if the disk does not respond
_TAIL_CHARS = 2**18  # maximum for all ranks together
_MAX_BYTES = 2**26  # maximum size of a record; thousands of ranks need less


class RunEnd(NamedTuple):
    time: float
    exit_code: int | None  # None: a single process exited with an unknown code
    report: str


class RankRecord(NamedTuple):
    rank: int
    stats: tuple[StepStats, ...]
    lines: tuple[str, ...]  # the last lines of its output


class RunRecord(NamedTuple):
    path: str  # the record's folder
    start: Launch
    packages: Mapping[str, str]  # versions of all installed packages
    commit: Commit | None  # None: the script is not in a git repository
    kept: tuple[OutputPath, ...]
    ranks: tuple[RankRecord, ...]
    attempts: tuple[Attempt, ...]
    end: RunEnd | None

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def has_succeeded(self) -> bool:
        return self.end is not None and self.end.exit_code == 0

    @property
    def stats(self) -> Mapping[int, Sequence[StepStats]]:
        return {rank.rank: rank.stats for rank in self.ranks if rank.stats}

    @property
    def tails(self) -> Mapping[int, Sequence[str]]:
        return {rank.rank: rank.lines for rank in self.ranks if rank.lines}

    @property
    def shares(self) -> dict[str, float] | None:
        """Fractions of the wall time by activity; None if unknown."""
        return shares(self.attempts, self.end.time) if self.end is not None else None

    @property
    def num_steps(self) -> int:
        """The last step that any rank reported; 0 if there is none."""
        return max((rows[-1].step for rows in self.stats.values()), default=0)

    @property
    def samples_per_s(self) -> float | None:
        """Combined throughput of all ranks over all their steps; None if unknown."""
        rates = []
        for rows in self.stats.values():
            seconds, samples = sum(row.seconds for row in rows), sum(row.samples for row in rows)
            if seconds > 0 and samples:
                rates.append(samples / seconds)
        return sum(rates) if rates else None


class StatsSeries:
    """Stores the step statistics of all ranks in a bounded number of rows, for runs of any length.

    Rows are merged as the run grows. Sums stay exact.
    """

    def __init__(self) -> None:
        self._rows: dict[int, list[StepStats]] = {}

    def note(self, rank: int, stats: StepStats) -> None:
        """Add a rank's statistics; a non-finite loss is stored as None."""
        if stats.loss is not None and not abs(stats.loss) <= _LARGEST_LOSS:
            stats = stats._replace(loss=None)
        rows = self._rows.setdefault(rank, [])
        if not stats.num_steps:  # updates only the position
            rows[-1:] = [_merged([row, stats]) for row in rows[-1:]]
            return
        rows.append(stats)
        if len(rows) > 2 * max(_MOST_ROWS // (2 * len(self._rows)), _LEAST_ROWS):
            rows[:] = map(_merged, [rows[index : index + 2] for index in range(0, len(rows), 2)])

    def ranks(self, tails: Mapping[int, Sequence[str]]) -> tuple[RankRecord, ...]:
        rows = {rank: tuple(kept) for rank, kept in self._rows.copy().items()}
        return tuple(
            RankRecord(rank, rows.get(rank, ()), tuple(tails.get(rank, ())))
            for rank in sorted(rows.keys() | tails.keys())
        )


def _merged(rows: Sequence[StepStats]) -> StepStats:
    last = rows[-1]
    devices = [row.device_bytes for row in rows if row.device_bytes is not None]
    losses = [row.loss for row in rows if row.loss is not None]
    return last._replace(
        **{name: sum(getattr(row, name) for row in rows) for name in _SUMMED},
        rss_bytes=max(row.rss_bytes for row in rows),
        device_bytes=max(devices, default=None),
        loss=losses[-1] if losses else None,
    )


class Recorder:
    """Writes a record in a background thread, which also calls `start`.

    Ranks and launches never wait for the thread. Secrets in recorded output are masked.
    """

    def __init__(self, path: str, start: Callable[[], Launch], secrets: Sequence[str] = ()) -> None:
        self.path = path
        self.exit_code = 1
        self.report = ""  # printed cause of the failure
        self.tails: Callable[[], Mapping[int, Sequence[str]]] = dict  # the last lines of each rank
        self.kept: Callable[[], Iterable[OutputPath]] = tuple  # paths reported by ranks
        self.attempts: Callable[[], Sequence[Attempt]] = tuple
        self._secrets = secrets
        self._series = StatsSeries()
        self._kept: list[OutputPath] = []
        self._tails: Mapping[int, Sequence[str]] = {}
        self._end: RunEnd | None = None
        self._has_news = threading.Event()
        self._thread = threading.Thread(
            target=self._write, args=(start,), name="headway-record", daemon=True
        )
        self._thread.start()

    def note(self, rank: int, stats: StepStats) -> None:
        """Add a rank's statistics, to be written periodically."""
        self._series.note(rank, stats)

    def keep(self, what: str, path: str) -> None:
        self._kept.append(OutputPath(what, os.path.abspath(path)))
        self._has_news.set()

    def close(self) -> None:
        """Record the outcome of the run; blocks for at most a few seconds."""
        self._kept += self.kept()
        tails = self.tails()
        most = _TAIL_CHARS // max(len(tails), 1)
        self._tails = {
            rank: masked_text("\n".join(lines[-TAIL_LINES:]), self._secrets)[-most:].split("\n")
            for rank, lines in tails.items()
        }
        report = masked_text(self.report[-MAX_TEXT:], self._secrets)
        self._end = RunEnd(epoch_time(), self.exit_code, report)
        self._has_news.set()
        self._thread.join(_CLOSE_WITHIN_S)
        if self._thread.is_alive():
            log(f"note: the record of this run is incomplete: {self.path} does not respond")

    def _write(self, start: Callable[[], Launch]) -> None:
        try:
            record = store.begin(self.path, start())
            while record["end"] is None:
                self._has_news.wait(_EVERY_S)
                self._has_news.clear()
                record["end"] = plain(self._end)  # set last
                record["kept"] = plain(self._kept)
                record["attempts"] = [
                    plain(attempt._replace(cause=masked_text(attempt.cause, self._secrets)))
                    for attempt in self.attempts()
                ]
                record["ranks"] = plain(self._series.ranks(self._tails))
                store.write(self.path, record)
        except OSError as error:
            log(store.failure_message(error))


def decode(text: bytes) -> RunRecord:
    """Parse a record; raise ValueError with a predicate as its message, such as "is damaged"."""
    found = None
    try:
        fields = json.loads(text)
        if isinstance(fields, dict) and (found := fields.pop("format", None)) == FORMAT:
            return read(RunRecord, fields)
    except SchemaError as error:
        raise ValueError(f"is damaged: {error}") from None
    except (ValueError, RecursionError):
        raise ValueError("is damaged: it is not JSON") from None
    if type(found) is int:
        raise ValueError(f"has format {found!r:.20}, but this version of Headway reads {FORMAT}")
    raise ValueError("is damaged: it has no format number")


def is_running(record: RunRecord) -> bool:
    """Return whether a run is still active, as far as this machine can check."""
    start = record.start
    if record.end is not None or start.host != os.uname().nodename:
        return False
    import psutil

    with suppress(psutil.Error):
        return bool(psutil.Process(start.pid).create_time() <= start.began_at + 1)
    return False


def read_record(path: str) -> RunRecord:
    """Return the record in a run's folder; raise ConfigError if it cannot be read."""
    try:
        return decode(read_plain(os.path.join(path, FILE), _MAX_BYTES))._replace(path=path)
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else error
        what = f"the record of run {os.path.basename(path)} {reason}"
        raise ConfigError(
            what, where=path, fix=f"remove that folder; {_FIX}", code=Code.UNREADABLE
        ) from None


def read_all() -> tuple[list[RunRecord], list[str]]:
    """Return all runs, newest last, and the errors of unreadable records."""
    folder = runs_folder()
    found, refused = [], []
    for name in _names_in(folder):
        try:
            found.append(read_record(os.path.join(folder, name)))
        except ConfigError as error:
            if not is_absent(os.path.join(folder, name, FILE)):  # absent: just started
                refused.append(error.problems[0].what)
    return sorted(found, key=lambda run: (run.start.began_at, run.name)), refused


def _names_in(folder: str) -> list[str]:
    try:
        return names_in(folder)
    except OSError as error:
        what = f"the records of runs cannot be read: {error.strerror}"
        raise ConfigError(
            what, where=folder, fix="check the permissions of the folder", code=Code.UNREADABLE
        ) from None


def find(word: str | None) -> RunRecord:
    """Return the run whose name starts or ends with `word`; the newest run if `word` is None.

    Raises ConfigError if no run or several runs match, or if the record cannot be read.
    """
    folder = runs_folder()
    names = _names_in(folder)
    if word is None:
        found, refused = read_all()
        if refused and (not found or names[-1] > found[-1].name):
            log(f"note: {refused[-1]}")
        if not found:
            fix = "`headway launch` records each run unless the setting record is off"
            raise ConfigError(
                "there are no readable run records", where=folder, fix=fix, code=Code.NO_RUN
            )
        return found[-1]
    meant = [name for name in names if word and (name.startswith(word) or name.endswith(word))]
    if len(meant) == 1:
        return read_record(os.path.join(folder, meant[0]))
    what = f"{word!r} matches {len(meant)} runs; the newest are {', '.join(meant[-5:])}"
    if not meant:
        what = f"unknown run {word!r}{suggestion(word, names)}"
    raise ConfigError(what, where="the command line", fix=_FIX, code=Code.NO_RUN)


def last_successful(record: RunRecord, others: Sequence[RunRecord]) -> RunRecord | None:
    """Return the last successful run of the same script before this run started."""
    script, began_at = record.start.script or record.start.program, record.start.began_at
    same = [other for other in others if (other.start.script or other.start.program) == script]
    good = [run for run in same if run.has_succeeded and run.start.began_at < began_at]
    return good[-1] if good else None
