"""Finds the rank that delays all other ranks, and the cause, from the ranks' step times.

The last rank to enter a collective waits least, and its peers wait for it. The delay is the peers'
median waiting time minus the slow rank's. A cause is named only if one phase takes longer on the
slow rank, and the difference accounts for most of the delay. To avoid false reports, every peer
must wait for at least half of the delay, and the same rank must be the slowest in several
consecutive intervals.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from headway.ipc.records import DURATIONS, StepStats

MIN_SHARE = 0.1  # of a step; a smaller delay is not reported
_MIN_DELAY_S = 0.0005  # per step; a smaller delay is noise
_MIN_EXPLAINED = 0.8  # of the delay, for one cause to be named
_MIN_GAP = 0.5  # of the delay; every peer must wait this much longer than the slow rank

DATA, FORWARD, BACKWARD, SAVE = "data", "forward", "backward", "save"
MACHINE, SCRIPT = "machine", "script"
_PHASES = (DATA, FORWARD, BACKWARD, SAVE)
_NAMES = {
    None: "no single phase explains the delay",
    DATA: "its data loader",
    FORWARD: "its forward pass",
    BACKWARD: "its backward pass",
    SAVE: "its checkpoint saving",
    MACHINE: "other processes use its cores, or its CPU quota is used up",
    SCRIPT: "other work in the script, such as evaluating, saving or logging on this rank only",
}


class Times(NamedTuple):
    """The times of one step on one rank, in seconds."""

    step: float
    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    sync: float = 0.0
    save: float = 0.0
    machine: float = 0.0  # runnable, but without a core to run on

    @property
    def has_phases(self) -> bool:
        """Whether an Accelerator measured phases; otherwise, waiting times are also unknown."""
        return bool(self.data or self.forward or self.backward)

    @property
    def script(self) -> float:
        """The time outside of all phases: the optimizer step and other work of the script."""
        phases = self.data + self.forward + self.backward + self.sync + self.save
        return max(self.step - phases, 0.0)


class SlowRank(NamedTuple):
    rank: int
    cost_s: float  # the delay of each step
    step_s: float
    cause: str | None  # a key of `_NAMES`; None: unknown
    ratio: float = 0.0  # the rank's time in that phase divided by the peers' median; 0: unknown

    def describe(self, host: str = "") -> str:
        """Describe the rank in a sentence without a full stop; pass `host` on multi-node runs."""
        on = f" on {host}" if host else ""
        times = f" ({self.ratio:.1f} times the median)" if self.ratio else ""
        cost, step = self.cost_s * 1e3, self.step_s * 1e3
        return (
            f"rank {self.rank}{on} delays all ranks by {cost:.{_digits(cost)}f} ms per "
            f"{step:.{_digits(step)}f} ms step: {_NAMES[self.cause]}{times}"
        )


def _digits(milliseconds: float) -> int:
    return 0 if milliseconds >= 10 else 1


def mean_step(records: Collection[StepStats]) -> Times:
    """Return the mean times of a step in one rank's records, which contain at least one step."""
    num_steps = sum(row.num_steps for row in records)
    return Times(*(sum(getattr(row, name) for row in records) / num_steps for name in DURATIONS))


def find_slow_rank(times: Mapping[int, Times]) -> SlowRank | None:
    """Return the rank that clearly delays all other ranks; None if the delay is small."""
    if len(times) < 2 or not all(time.has_phases for time in times.values()):
        return None
    last, *others = sorted(times, key=lambda rank: times[rank].sync)
    step_s = median(time.step for time in times.values())
    own = times[last]
    cost_s = median(times[rank].sync for rank in others) - own.sync
    is_clear = times[others[0]].sync - own.sync >= _MIN_GAP * cost_s
    if step_s <= 0 or cost_s < max(MIN_SHARE * step_s, _MIN_DELAY_S) or not is_clear:
        return None
    usual = Times(*map(median, zip(*(times[rank] for rank in others), strict=True)))
    for cause in (MACHINE, *_PHASES):
        taken_s, median_s = getattr(own, cause), getattr(usual, cause)
        more_s = taken_s - median_s
        if more_s >= _MIN_EXPLAINED * cost_s:
            # a ratio to almost 0 is meaningless
            has_ratio = cause != MACHINE and median_s > 0.01 * step_s
            ratio = taken_s / median_s if has_ratio else 0.0
            return SlowRank(last, cost_s, step_s, cause, ratio)
    is_script = own.script - usual.script >= _MIN_EXPLAINED * cost_s
    return SlowRank(last, cost_s, step_s, SCRIPT if is_script else None)


def find_persistent_slow_rank(intervals: Sequence[Mapping[int, Times]]) -> SlowRank | None:
    """Return the rank that delays all other ranks in every interval, or None if there is none."""
    ranks = {slow and slow.rank for slow in map(find_slow_rank, intervals)}
    if len(ranks) != 1 or None in ranks:
        return None
    steps = {rank: [interval[rank] for interval in intervals] for rank in intervals[0]}
    return find_slow_rank(
        {rank: Times(*map(fmean, zip(*each, strict=True))) for rank, each in steps.items()}
    )
