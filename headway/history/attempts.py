"""Breakdown of a run's wall time over its attempts.

Times are measured on rank 0. Steps that an earlier attempt had already completed are reported as
repeated; their time includes saves and waiting for data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headway.ipc.records import StepStats

SHARES = (
    *("training", "start", "recovery", "repeated steps", "saving", "waiting for data", "other"),
)
_REPORT_EVERY_S = 1.0  # interval of the ranks' reports


class Attempt(NamedTuple):
    began_at: float  # start of the run or failure of the previous attempt, in seconds
    first: int  # number of its first step; 0: unknown
    first_at: float  # end of the first step
    last: int
    last_at: float  # the last report of rank 0
    spent: Mapping[str, float]  # seconds by activity, after the first step
    cause: str  # cause of the previous failure; empty for the first attempt
    failed_at_step: int  # last step before that failure; 0: unknown
    num_restarts: int  # restarts used so far


class Attempts:
    """The attempts of a run, computed from its step statistics."""

    def __init__(self, began_at: float) -> None:
        self.rows = [Attempt(began_at, 0, 0.0, 0, 0.0, {}, "", 0, 0)]
        self._furthest = 0  # last step of all earlier attempts
        self._restart = ""  # a restart whose cost is not known yet

    def begin(self, restart: str, at: float, cause: str, step: int, num_restarts: int) -> None:
        """Begin the attempt after the failure `cause`; `restart` names the restart in messages."""
        self._furthest = max(self._furthest, self.rows[-1].last)
        self.rows.append(Attempt(at, 0, 0.0, 0, 0.0, {}, cause, step, num_restarts))
        self._restart = restart

    def end(self, step: int, at: float) -> None:
        """End the last attempt at `step` if it was too short to report statistics."""
        if step and not self.rows[-1].first:
            self.rows[-1] = self.rows[-1]._replace(first=step, first_at=at, last=step, last_at=at)

    def note(self, rank: int, stats: StepStats, now: float) -> str:
        """Add a rank's statistics; after a restart, return its cost at the first new step."""
        if rank != 0:
            return ""
        row, count = self.rows[-1], stats.num_steps
        before = stats.step - count
        if count and not row.first:
            row = row._replace(first=max(before, 1), first_at=now - stats.seconds)
        furthest = self._furthest if stats.has_global_steps else 0
        repeated = min(max(furthest - before, 0), count) / max(count, 1)
        spent = defaultdict(float, row.spent)
        spent["repeated steps"] += stats.seconds * repeated
        spent["saving"] += stats.save_s * (1 - repeated)
        spent["waiting for data"] += stats.data_s * (1 - repeated)
        training_s = max(stats.seconds - stats.save_s - stats.data_s, 0.0)
        spent["training"] += training_s * (1 - repeated)
        self.rows[-1] = row = row._replace(last=stats.step, last_at=now, spent=spent)
        if not (self._restart and count) or stats.step <= furthest:
            return ""
        restart, self._restart = self._restart, ""
        new = max(row.first, furthest + 1)
        repeats = new - row.first
        new_at = now - (stats.step - new) * stats.seconds / count
        cost = f"{restart}: {new_at - row.began_at:.1f} s to step {new}"
        return f"{cost}, {repeats} step{'s' * (repeats != 1)} repeated" if furthest else cost


def shares(attempts: Sequence[Attempt], ended_at: float) -> dict[str, float] | None:
    """Return the fractions of a run's wall time by activity; None if no step was reported.

    At most one step or one second of the time between an attempt's last report and its failure
    counts as training.
    """
    if not any(attempt.first for attempt in attempts):
        return None
    spent = dict.fromkeys(SHARES, 0.0)
    ends = [*(attempt.began_at for attempt in attempts[1:]), ended_at]
    for number, (attempt, end) in enumerate(zip(attempts, ends, strict=True)):
        begun_at = attempt.first_at if attempt.first else end
        spent["recovery" if number else "start"] += begun_at - attempt.began_at
        for name, seconds in attempt.spent.items():
            spent[name] += seconds
        if end != ended_at and attempt.first:
            step_s = (attempt.last_at - attempt.first_at) / max(attempt.last - attempt.first, 1)
            spent["training"] += min(max(end - attempt.last_at, 0.0), max(step_s, _REPORT_EVERY_S))
    spent["other"] = max(ended_at - attempts[0].began_at - sum(spent.values()), 0.0)
    whole = sum(spent.values()) or 1.0
    return {name: seconds / whole for name, seconds in spent.items()}
