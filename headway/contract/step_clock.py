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

from headway.contract.figures import Figures
from headway.contract.lost_time import LostTime

SCRIPT, DATA, FORWARD, BACKWARD, SYNC, SAVE = range(6)
_NUM_PHASES = 6

_EVERY_S = 1.0
_now, _epoch = time.perf_counter, time.time  # a script may replace them


class StepClock:
    """Adds up what steps take, until `take`.

    Attributes:
        is_on: somebody reads: what each step pays for need not be called before `begin`.
        device_bytes: returns how much of its device's memory this process holds; None for a CPU.
        num_workers: of the loader that gave the last batch.
        batch_samples: of this rank, in the batch that the loader gave last.
        num_samples: that backward passes have used since the last record.
        due_at: when the next record is due.
        lost_time: of the thread that trains, to its machine.
    """

    __slots__ = (
        *("is_on", "spent", "phase", "mark", "num_steps", "last_step", "due_at"),
        *("num_workers", "batch_samples", "num_samples", "lost_time", "device_bytes"),
    )

    def __init__(self) -> None:
        self.is_on = False
        self.spent = [0.0] * _NUM_PHASES
        self.phase, self.mark = SCRIPT, _now()
        self.num_steps = 0  # since the last record
        self.last_step = -1  # the number of the last one in a record; -1 before the first
        self.due_at = 0.0
        self.num_workers: int | None = None
        self.batch_samples = self.num_samples = 0
        self.lost_time = LostTime()
        self.device_bytes: Callable[[], int | None] = lambda: None

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
        """Return the figures of the steps since the last time; None for the first one.

        Args:
            step: the number of the step that has just ended.
        """
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
