"""Which rank all others wait for, and why: a pure rule over what each rank's steps have taken.

In an exchange that all ranks take part in, the last one to come waits least, and all others wait
for it. What it costs them is how much less it waits than the others do, by their median. A cause is
named only where the rank spends that much more than the others in one place. The rule would rather
be silent than wrong: the second to come must wait for at least half of that, too, and the same rank
must be last in each of several intervals of the training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from headway.ipc.records import Figures

MIN_SHARE = 0.1  # of a step; smaller delays are not reported
_MIN_DELAY_S = 0.0005  # of a step: smaller delays are noise
_MIN_EXPLAINED = 0.8  # of the cost, by a cause
_MIN_GAP = 0.5  # of the cost, which the rank that waits second least waits for, too

DATA, FORWARD, BACKWARD, SAVE = "data", "forward", "backward", "save"
MACHINE, SCRIPT = "machine", "script"
_PHASES = (DATA, FORWARD, BACKWARD, SAVE)
_NAMES = {
    None: "none of its loader, passes and saving explains it alone",
    DATA: "its data loader",
    FORWARD: "its forward pass",
    BACKWARD: "its backward pass",
    SAVE: "its saving",
    MACHINE: "other processes use its cores, or its CPU quota is used up",
    SCRIPT: "other work in the script, such as evaluating, saving or logging on this rank only",
}


class Times(NamedTuple):
    """What one step takes on one rank, in seconds."""

    step: float
    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    sync: float = 0.0
    save: float = 0.0
    machine: float = 0.0  # ready to compute, without a core

    @property
    def has_phases(self) -> bool:
        """Whether an Accelerator trains, which knows them; without one waiting is unknown too."""
        return bool(self.data or self.forward or self.backward)

    @property
    def script(self) -> float:
        """What is in no phase: the optimizer's step, and all else that the script does."""
        phases = self.data + self.forward + self.backward + self.sync + self.save
        return max(self.step - phases, 0.0)


class SlowRank(NamedTuple):
    rank: int
    cost_s: float  # for the others, in each step
    step_s: float
    cause: str | None  # a key of `_NAMES`; None: none of these explains it
    ratio: float = 0.0  # of the cause: this rank's time to the others' median; 0: they have none

    def describe(self, host: str = "") -> str:
        """Return it as a sentence without an end; `host` is named where there are several."""
        on = f" on {host}" if host else ""
        times = f" ({self.ratio:.1f} times the median)" if self.ratio else ""
        cost, step = self.cost_s * 1e3, self.step_s * 1e3
        return (
            f"rank {self.rank}{on} makes all others wait {cost:.{_digits(cost)}f} ms of each "
            f"{step:.{_digits(step)}f} ms: {_NAMES[self.cause]}{times}"
        )


def _digits(milliseconds: float) -> int:
    return 0 if milliseconds >= 10 else 1


def mean_step(records: Iterable[Figures]) -> Times | None:
    """Return the mean step of these records of one rank; None without a step."""
    taken = list(records)
    num_steps = sum(row.num_steps for row in taken)
    if num_steps <= 0:
        return None
    return Times(
        *(
            sum(getattr(row, name) for row in taken) / num_steps
            for name in (
                *("seconds", "data_s", "forward_s", "backward_s", "sync_s", "save_s", "stolen_s"),
            )
        )
    )


def find_slow_rank(times: Mapping[int, Times]) -> SlowRank | None:
    """Return the rank that all others wait for in these steps, if that costs enough."""
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
            # a ratio to next to nothing says nothing
            has_ratio = cause != MACHINE and median_s > 0.01 * step_s
            ratio = taken_s / median_s if has_ratio else 0.0
            return SlowRank(last, cost_s, step_s, cause, ratio)
    is_script = own.script - usual.script >= _MIN_EXPLAINED * cost_s
    return SlowRank(last, cost_s, step_s, SCRIPT if is_script else None)


def find_persistent_slow_rank(intervals: Sequence[Mapping[int, Times]]) -> SlowRank | None:
    """Return the rank that all others wait for in every one of these intervals of the training."""
    found = [find_slow_rank(interval) for interval in intervals]
    if not found or any(item is None for item in found):
        return None
    if len({item.rank for item in found if item is not None}) > 1:
        return None
    return find_slow_rank(mean_times(intervals))


def mean_times(intervals: Sequence[Mapping[int, Times]]) -> dict[int, Times]:
    return {
        rank: Times(*(sum(parts) / len(intervals) for parts in zip(*each, strict=True)))
        for rank in intervals[0]
        if (each := [interval[rank] for interval in intervals])
    }
