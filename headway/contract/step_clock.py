"""What this process's steps spend their time on: one clock, and the phase that it counts for.

Every moment between the ends of two optimizer steps counts for one phase. The parts of the runtime
switch the phase where they begin and end their work; a switch is one look at the clock. What a
script does between a batch and its backward pass is the forward pass.

Only the thread that trains is to call it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

SCRIPT, DATA, FORWARD, BACKWARD, SYNC, SAVE = range(6)
_NUM_PHASES = 6

_EVERY_S = 1.0
_WAITED = "/proc/thread-self/schedstat"
_now, _epoch = time.perf_counter, time.time  # a script may replace them


class Figures(NamedTuple):
    """What the optimizer steps since the last such record took, of one rank, for its launcher."""

    time: float  # seconds since the epoch, when the last of them ended
    step: int  # the number of the last of them
    num_steps: int  # of them
    seconds: float  # that they took, from end to end
    data_s: float  # of those, waiting for the loader
    forward_s: float
    backward_s: float  # without the exchange of gradients, where it can be told apart
    sync_s: float  # waiting for other ranks: exchange of gradients, meetings
    save_s: float
    samples: int  # of this rank; 0: not known
    rss_bytes: int
    device_bytes: int | None  # held of the device's memory; None on a CPU
    total: int  # steps that the training will have; 0: not known
    loss: float | None  # the last one that is known
    num_workers: int | None = None  # of the loader that gave the last batch; None: not known
    stolen_s: float = 0.0  # of `seconds`, ready to compute while others had its core; 0: not known
    throttled_s: float = 0.0  # of `stolen_s`, at most: its cgroup had used up its CPU quota


class Lost(NamedTuple):
    """What the thread could not use of its time, in seconds."""

    stolen: float  # it was ready to run, and did not
    throttled: float  # of that, at most: its cgroup had used up its CPU quota


class LostTime:
    """Counts what the calling thread loses to its machine, as far as Linux counts it.

    Sources: the kernel's sched-stats.rst, cgroup-v2.rst, and for cgroup v1 sched-bwc.rst.
    """

    def __init__(self) -> None:
        self.quota_file = ""  # a cgroup's `cpu.stat`; empty if this process has no CPU quota
        self._before = Lost(0.0, 0.0)

    def take(self) -> Lost:
        """Return what was lost since the last time, or since the thread began."""
        before = self._before
        self._before = now = Lost(_stolen(before.stolen), self._throttled(before.throttled))
        stolen, throttled = (max(a - b, 0.0) for a, b in zip(now, before, strict=True))
        return Lost(stolen, min(throttled, stolen))  # the quota's is added up over cores

    def _throttled(self, otherwise: float) -> float:
        if not self.quota_file:
            return otherwise
        try:
            with open(self.quota_file, "rb") as file:
                words = file.read().split()
            if b"throttled_usec" in words:  # cgroup v2
                return int(words[words.index(b"throttled_usec") + 1]) / 1e6
            return int(words[words.index(b"throttled_time") + 1]) / 1e9
        except (OSError, ValueError, IndexError):
            return otherwise


def _stolen(otherwise: float) -> float:
    try:
        with open(_WAITED, "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return otherwise


class StepClock:
    """Adds up what steps take, until `take`."""

    __slots__ = (
        *("is_on", "spent", "phase", "mark", "num_steps", "last_step", "due_at"),
        *("num_workers", "batch_samples", "num_samples", "lost_time", "device_bytes"),
    )

    def __init__(self) -> None:
        self.is_on = False  # somebody reads; before, what each step pays for need not be called
        self.spent = [0.0] * _NUM_PHASES
        self.phase, self.mark = SCRIPT, _now()
        self.num_steps = 0  # since the last record
        self.last_step = -1  # the number of the last one in a record; -1 before the first
        self.due_at = 0.0  # the next record
        self.num_workers: int | None = None  # of the loader that gave the last batch
        self.batch_samples = 0  # of this rank, in the batch that the loader gave last
        self.num_samples = 0  # that backward passes have used since the last record
        self.lost_time = LostTime()  # of the thread that trains
        self.device_bytes: Callable[[], int | None] = lambda: None  # of this process; None: a CPU

    def begin(self) -> None:
        """Have records become due from the second step on: the first one warms up."""
        self.is_on = True

    def switch(self, phase: int) -> int:
        """Let the time from now on count for `phase`; return for which it counted before."""
        now, before = _now(), self.phase
        self.spent[before] += now - self.mark
        self.mark, self.phase = now, phase
        return before

    def begin_exchange(self) -> None:
        """Note that this rank has computed a gradient, which may be the last one.

        What follows is waiting for other ranks, unless this is called again in the same pass.
        """
        now, before = _now(), self.phase
        self.spent[BACKWARD if before == SYNC else before] += now - self.mark
        self.mark, self.phase = now, SYNC

    def end_backward(self) -> None:
        """Note the end of a backward pass, and the samples of its batch."""
        now = _now()
        self.spent[self.phase] += now - self.mark
        self.mark, self.phase = now, SCRIPT
        self.num_samples += self.batch_samples
        self.batch_samples = 0

    def end_step(self) -> bool:
        """Note the end of an optimizer step; return whether a record of the steps is due."""
        now = _now()
        self.spent[self.phase] += now - self.mark
        self.mark, self.phase = now, SCRIPT
        self.num_steps += 1
        return self.is_on and now >= self.due_at

    def take(self, step: int, total: int, loss: float | None) -> Figures | None:
        """Return the figures of the steps up to this one since the last time, None at first."""
        is_first, lost = self.last_step < 0, self.lost_time.take()
        num_steps = min(max(step - self.last_step, 1), self.num_steps)
        figures = Figures(
            time=_epoch(),
            step=step,
            num_steps=num_steps,
            seconds=sum(self.spent),
            data_s=self.spent[DATA],
            forward_s=self.spent[FORWARD],
            backward_s=self.spent[BACKWARD],
            sync_s=self.spent[SYNC],
            save_s=self.spent[SAVE],
            samples=self.num_samples,
            rss_bytes=_rss_bytes(),
            device_bytes=self.device_bytes(),
            total=total,
            loss=loss,
            num_workers=self.num_workers,
            stolen_s=lost.stolen,
            throttled_s=lost.throttled,
        )
        self.spent[:] = [0.0] * _NUM_PHASES
        self.num_steps = self.num_samples = 0
        self.last_step, self.due_at = step, 0.0 if is_first else self.mark + _EVERY_S
        return None if is_first else figures


clock = StepClock()


@contextmanager
def spending(phase: int) -> Iterator[None]:
    """Let the time in the block count for `phase`."""
    before = clock.switch(phase)
    try:
        yield
    finally:
        clock.switch(before)


def _rss_bytes() -> int:
    """Return how much memory this process has in use; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
