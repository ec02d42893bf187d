"""What the wall time of a run was spent on, by the attempts of its ranks. Pure.

Rank 0 stands for all ranks. A step that an earlier attempt had done is a repeated one, with its
saves and its waiting for data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from headway.ipc.records import Figures

SHARES = (
    *("training", "start", "recovery", "repeated steps", "saving", "waiting for data", "other"),
)
_REPORT_EVERY_S = 1.0


class Attempt(NamedTuple):
    began_at: float  # when the run did, or when the attempt before it failed; since the epoch
    first: int = 0  # the number of its first step; 0: none is known
    first_at: float = 0.0  # when that was done
    last: int = 0
    last_at: float = 0.0  # the last report of rank 0
    spent: Mapping[str, float] = MappingProxyType({})  # seconds of its steps after the first one
    cause: str = ""  # of the failure that it follows; empty for the first attempt
    failed_at_step: int = 0  # that the training had reached then; 0: not known
    num_restarts: int = 0  # that were used by then


class Attempts:
    """The attempts of a run so far, from the figures of its steps."""

    def __init__(self, began_at: float) -> None:
        self.rows = [Attempt(began_at)]
        self._furthest = 0  # step of all earlier attempts
        self._restart = ""  # whose cost is not known yet

    def begin(self, attempt: Attempt, restart: str) -> None:
        """Begin an attempt; `restart` names it in a sentence."""
        self._furthest = max(self._furthest, self.rows[-1].last)
        self.rows.append(attempt)
        self._restart = restart

    def end(self, step: int, at: float) -> None:
        """End the last attempt, which has come to `step`: too few steps have no figures."""
        if step and not self.rows[-1].first:
            self.rows[-1] = self.rows[-1]._replace(first=step, first_at=at, last=step, last_at=at)

    def note(self, rank: int, figures: Figures, now: float) -> str:
        """Add figures of a rank; return what a restart has cost, once a new step is done."""
        if rank != 0:
            return ""
        row, count = self.rows[-1], figures.num_steps
        before = figures.step - count
        if count and not row.first:
            row = row._replace(first=max(before, 1), first_at=now - figures.seconds)
        furthest = self._furthest if figures.counts_training else 0
        repeated = min(max(furthest - before, 0), count) / max(count, 1)
        spent = defaultdict(float, row.spent)
        spent["repeated steps"] += figures.seconds * repeated
        spent["saving"] += figures.save_s * (1 - repeated)
        spent["waiting for data"] += figures.data_s * (1 - repeated)
        training_s = max(figures.seconds - figures.save_s - figures.data_s, 0.0)
        spent["training"] += training_s * (1 - repeated)
        self.rows[-1] = row = row._replace(last=figures.step, last_at=now, spent=spent)
        if not (self._restart and count) or figures.step <= furthest:
            return ""
        restart, self._restart = self._restart, ""
        new = max(row.first, furthest + 1)
        repeats = new - row.first
        new_at = now - (figures.step - new) * figures.seconds / count
        cost = f"{restart}: {new_at - row.began_at:.1f} s to step {new}"
        return f"{cost}, {repeats} step{'s' * (repeats != 1)} repeated" if furthest else cost


def shares(attempts: Sequence[Attempt], ended_at: float) -> dict[str, float] | None:
    """Return the parts of a run's wall time, which sum to 1; None without a known step.

    An attempt that was killed has not reported its last moments, which count as training.
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
    wall_s = ended_at - attempts[0].began_at
    spent["other"] = max(wall_s - sum(spent.values()), 0.0)
    whole = sum(spent.values()) or 1.0
    return {name: seconds / whole for name, seconds in spent.items()}
