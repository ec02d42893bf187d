"""Collects the step statistics that the ranks on all machines report."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from headway.ipc.records import StepStats
from headway.launcher.step_stats.slow_rank import (
    SlowRank,
    Times,
    find_persistent_slow_rank,
    mean_step,
)

_WINDOW_S = 5.0  # shares and rates are means over this time
_INTERVAL_STEPS, _INTERVAL_S = 5, 1.0  # the minimum length of an analyzed interval
_NUM_INTERVALS = 4  # a rank is reported after it was the slowest in so many: at least 20 steps
_MAX_RECORDS = 120  # per rank
_QUIET_S = 5.0  # a longer time without a record is reported
_DATA_BOUND = 1 / 3  # waiting for data is reported if it takes at least this share of a step


class RankRow(NamedTuple):
    rank: int
    machine: int
    host: str
    step: int
    total: int  # number of training steps; 0: unknown
    loss: float | None
    step_ms: float
    data_share: float | None  # of the step time; None without an Accelerator
    compute_share: float | None
    sync_share: float | None
    save_share: float | None
    samples_per_s: float | None  # None if unknown or if no steps are reported
    rss_bytes: int
    device_bytes: int | None
    age_s: float  # seconds since the last record
    is_lost: bool  # whether the connection to its machine is lost


class _Rank:
    def __init__(self, machine: int) -> None:
        self.machine = machine
        # of the last `_WINDOW_S` seconds
        self.recent: deque[StepStats] = deque(maxlen=_MAX_RECORDS)
        self.pending: deque[StepStats] = deque(maxlen=_MAX_RECORDS)
        self.recorded_at = 0.0

    def note(self, stats: StepStats) -> None:
        if not stats.num_steps:
            self.recent[-1] = self.recent[-1]._replace(step=stats.step, loss=stats.loss)
            return
        self.recent.append(stats)
        while len(self.recent) > 1 and sum(row.seconds for row in self.recent) > _WINDOW_S:
            self.recent.popleft()
        self.pending.append(stats)
        self.recorded_at = time.monotonic()

    @property
    def has_interval(self) -> bool:
        """Whether the pending records cover an interval that is long enough to analyze."""
        steps = sum(row.num_steps for row in self.pending)
        seconds = sum(row.seconds for row in self.pending)
        return steps >= _INTERVAL_STEPS and seconds >= _INTERVAL_S


class RunStats:
    """The steps that all ranks have reported. This class is thread-safe."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[int, StepStats], None]] = []
        """Functions that are called with each rank and record, in the thread that calls `note`."""
        self.report: Callable[[str], None] = lambda _: None
        """A function that is called with a sentence about a slow rank or slow data loading."""
        self._last_report: object = None  # the subject of the last sentence
        self._lock = threading.RLock()
        self.begin_attempt(1)

    def begin_attempt(self, num_ranks: int, machine: int = 0) -> None:
        """Discard the last attempt's ranks, and expect `num_ranks` new ranks on all machines."""
        with self._lock:
            self._machine, self._num_ranks = machine, num_ranks
            self._hosts = {machine: socket.gethostname()}  # by machine
            self._lost: set[int] = set()  # machines whose connection is lost
            self._ranks: dict[int, _Rank] = {}
            self._intervals: deque[dict[int, Times]] = deque(maxlen=_NUM_INTERVALS)
            self.slowest: SlowRank | None = None
            """The rank that delayed all other ranks in the last intervals, if any."""

    def note(self, rank: int, stats: StepStats, machine: int | None = None, host: str = "") -> None:
        """Add a rank's record, unless the record is invalid; `machine` is None for this machine."""
        with self._lock:
            # a higher rank is from an earlier attempt with more machines
            if rank >= self._num_ranks or not _is_valid(stats):
                return
            where = self._machine if machine is None else machine
            self._hosts.setdefault(where, host)
            if not stats.num_steps and rank not in self._ranks:
                return
            known = self._ranks.setdefault(rank, _Rank(where))
            known.note(stats)
            self._analyze()
        for listener in self.listeners:
            listener(rank, stats)

    def drop_machine(self, machine: int) -> None:
        """Record that the connection to a machine was lost during the run."""
        with self._lock:
            self._lost.add(machine)
            self._intervals.clear()
            self.slowest = None  # the slow rank may have been on that machine

    def _analyze(self) -> None:
        """Analyze the pending records once all ranks have reported a whole interval."""
        ranks = self._ranks
        if len(ranks) < self._num_ranks or not all(rank.has_interval for rank in ranks.values()):
            return
        self._intervals.append({rank: mean_step(known.pending) for rank, known in ranks.items()})
        for known in ranks.values():
            known.pending.clear()
        if len(self._intervals) < _NUM_INTERVALS:
            return
        self.slowest = slow = find_persistent_slow_rank([*self._intervals])
        about: object = "data"
        if slow is not None:
            about, sentence = (slow.rank, slow.cause), self.describe_slowest()
        else:
            sentence = self.advice()
        if sentence and about != self._last_report:
            self._last_report = about
            self.report(sentence)

    def describe_slowest(self) -> str:
        """Return a sentence about the slow rank, or an empty string."""
        with self._lock:
            slow = self.slowest
            if slow is None:
                return ""
            host = self._hosts.get(self._ranks[slow.rank].machine, "")
            return slow.describe(host if len(self._hosts) > 1 else "")

    def rows(self) -> list[RankRow]:
        now = time.monotonic()
        with self._lock:
            return [self._row(rank, known, now) for rank, known in sorted(self._ranks.items())]

    def _row(self, rank: int, known: _Rank, now: float) -> RankRow:
        last, recent = known.recent[-1], known.recent
        seconds = sum(row.seconds for row in recent)
        has_phases = any(row.forward_s or row.backward_s or row.data_s for row in recent)
        samples = sum(row.samples for row in recent)
        step_s = seconds / max(sum(row.num_steps for row in recent), 1)
        age_s, is_lost = now - known.recorded_at, known.machine in self._lost
        is_training = not is_lost and age_s <= _quiet_limit_s(step_s)

        def share(*names: str) -> float | None:
            spent = sum(getattr(row, name) for row in recent for name in names)
            return min(max(spent / seconds, 0.0), 1.0) if has_phases and seconds > 0 else None

        elsewhere = share("data_s", "sync_s", "save_s")
        return RankRow(
            rank=rank,
            machine=known.machine,
            host=self._hosts.get(known.machine, ""),
            step=last.step,
            total=last.total,
            loss=last.loss if last.loss is not None and math.isfinite(last.loss) else None,
            step_ms=1e3 * step_s,
            data_share=share("data_s"),
            compute_share=None if elsewhere is None else 1 - elsewhere,
            sync_share=share("sync_s"),
            save_share=share("save_s"),
            samples_per_s=samples / seconds if samples and is_training else None,
            rss_bytes=last.rss_bytes,
            device_bytes=last.device_bytes,
            age_s=age_s,
            is_lost=is_lost,
        )

    def line(self) -> str:
        """Return the status line; empty before the first record, and on machines other than 0."""
        rows = self.rows()
        if not rows or self._machine != 0:
            return ""
        furthest = max(rows, key=lambda row: row.step)
        total = max(row.total for row in rows)
        parts = [f"step {furthest.step}" + (f"/{total}" if total else "")]
        parts += filter(None, (_shares(rows),))
        rates = [row.samples_per_s for row in rows if row.samples_per_s]
        if rates:
            parts.append(f"{sum(rates):.{0 if sum(rates) >= 10 else 1}f} samples/s")
        quiet_s, step_s = min(row.age_s for row in rows), furthest.step_ms / 1e3
        if quiet_s > _quiet_limit_s(step_s):
            parts.append(f"no step for {_format_duration(quiet_s)}")
        elif total > furthest.step:
            parts.append(f"{_format_duration((total - furthest.step) * step_s)} left")
        lost = sorted({row.host or str(row.machine) for row in rows if row.is_lost})
        if lost:
            parts.append(f"lost: {', '.join(lost)}")
        slow = self.slowest
        if slow is not None:
            cause = f", {slow.cause}" if slow.cause else ""
            parts.append(f"slowest: rank {slow.rank} (+{slow.cost_s * 1e3:.0f} ms{cause})")
        return "  ".join(parts)

    def advice(self) -> str:
        """Return a suggestion if all ranks often wait for data, or an empty string."""
        shares = [row.data_share for row in self.rows()]
        if not shares or any(share is None or share < _DATA_BOUND for share in shares):
            return ""
        least = min(share for share in shares if share is not None)
        who = "all ranks wait" if len(shares) > 1 else "training waits"
        with self._lock:
            last = [rank.recent[-1].num_workers for rank in self._ranks.values()]
        above = f" above {max(workers)}" if (workers := [n for n in last if n is not None]) else ""
        return (
            f"{who} for data {least * 100:.0f} % of the time: raise the DataLoader's num_workers"
            f"{above}, or load samples faster"
        )

    def to_json(self, last_line: Callable[[int], str]) -> dict[str, Any]:
        """Return the statistics for `headway top`."""
        slow, rows = self.slowest, self.rows()
        found = slow and {
            "rank": slow.rank,
            "machine": next((row.machine for row in rows if row.rank == slow.rank), 0),
            "cost_ms": slow.cost_s * 1e3,
            "cause": slow.cause,
        }
        return {
            "ranks": [{**row._asdict(), "last_line": last_line(row.rank)} for row in rows],
            "slowest": found,
            "words": [*filter(None, (self.describe_slowest(), self.advice()))],
        }


def _is_valid(stats: StepStats) -> bool:
    numbers = (number for number in stats._replace(loss=None) if number is not None)
    are_finite = all(math.isfinite(number) and number >= 0 for number in numbers)
    return are_finite and (stats.num_steps > 0) == (stats.seconds > 0)


def _quiet_limit_s(step_s: float) -> float:
    """Return the longest time to expect between two records if a step takes `step_s` seconds."""
    return max(_QUIET_S, 3 * step_s)


def _shares(rows: list[RankRow]) -> str:
    """Format each phase's share of the step time, if known, averaged over the ranks."""
    texts = []
    for name in ("compute", "data", "sync", "save"):
        shares = [getattr(row, f"{name}_share") for row in rows]
        if any(share is None for share in shares):
            continue
        mean = sum(shares) / len(shares)
        if mean >= 0.005 or name in ("compute", "data"):
            texts.append(f"{mean * 100:.0f} % {name}")
    return ", ".join(texts)


def _format_duration(seconds: float) -> str:
    """Format a duration as M:SS or H:MM:SS."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
