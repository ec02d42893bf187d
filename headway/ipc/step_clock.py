"""Time spent in each phase of this process's optimizer steps.

Exactly one phase is active at any time; each part of the runtime switches the phase when it starts
and finishes. The time between a batch and its backward pass counts as the forward pass.

On a GPU with timing events, the phases measure execution time on the device, not the time to
queue the work. A step is reported once the device has finished it.

The clock is not thread-safe: only the training thread may use it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from headway.devices.table import kind_of
from headway.ipc.records import StepStats

SCRIPT, DATA, FORWARD, BACKWARD, GRADIENTS, EXCHANGE, SYNC, SAVE = range(8)
NAMES = ("script", "data", "script", *("backward",) * 3, "script", "script")
"""Phase names shown by the launcher; "script" includes the forward pass.

A backward pass is split into two phases if the time of its last gradient is measured.
"""

_EVERY_S = 1.0  # between reports of step times, which the footer shows
_SPLIT_EVERY_S = 0.05  # interval between short steps whose backward passes are split
_MAX_MARKS = 4096  # per step timed on a device
_SCHEDSTAT = "/proc/thread-self/schedstat"
_now = time.perf_counter  # a script may replace it


class Event(Protocol):
    """A point in a device's queue, such as `torch.cuda.Event(enable_timing=True)`."""

    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Event, /) -> float: ...  # in milliseconds


class Tally:
    """Timing of consecutive steps.

    Steps of several optimizers count as one step if they have the same step number.
    """

    def __init__(self, step: int = -1) -> None:
        self.step = step  # number of the last step
        self.num_steps = 0
        self.samples = 0
        self.spent = [0.0] * len(NAMES)  # seconds per phase
        self.settled = self.spent  # excluding a running step

    def end_step(self, number: int, samples: int) -> None:
        self.num_steps += number != self.step
        self.step = number
        self.samples += samples


class _QueuedStep(NamedTuple):
    number: int
    samples: int
    marks: list[tuple[int, Event]]  # phases and their end events; the first starts the step
    then: Callable[[], None] | None  # called once the device has finished the step


class DeviceTimer:
    """The device time of each phase, measured by events in the device's queue between the phases.

    Idle time is added to the phase in which the device waits. Only finished steps are read, without
    synchronizing with the device. A step with too many phases, such as a step that contains an
    evaluation, is not timed.

    `record` records an event in the queue and returns it; if an event is passed, it is reused. A
    step is not timed if `record` returns None, for example during CUDA graph capture, or raises
    RuntimeError because the device failed.
    """

    def __init__(self, record: Callable[[Event | None], Event | None]) -> None:
        self._record = record
        self._unused: list[Event] = []
        self._marks: list[tuple[int, Event]] = []  # of the running step; empty if it is not timed
        self._then: Callable[[], None] | None = None
        self._queued: deque[_QueuedStep] = deque()

    def mark(self, phase: int) -> None:
        """Add the device time since the last mark of this step to `phase`."""
        if self._marks:
            event = self._put()
            if event is None or len(self._marks) == _MAX_MARKS:
                self._marks = []
            else:
                self._marks.append((phase, event))

    def end_step(self, number: int, samples: int, tally: Tally) -> None:
        """End a step at its last mark; add all steps that the device has finished to `tally`."""
        marks, then, self._then = self._marks, self._then, None
        begin = marks[-1][1] if marks else self._put()
        if marks:
            self._queued.append(_QueuedStep(number, samples, marks, then))
            with suppress(RuntimeError):  # device failure, as in `_put`
                while self._queued and self._queued[0].marks[-1][1].query():
                    self._finish(self._queued.popleft(), tally)
        self._marks = [] if begin is None else [(SCRIPT, begin)]

    def when_done(self, make_call: Callable[[], Callable[[], None]]) -> None:
        """Call the result of `make_call` once the device has finished this step.

        `make_call` runs immediately if the step is timed. No step is timed during graph capture.
        """
        if self._marks:
            self._then = make_call()

    def _put(self) -> Event | None:
        try:
            return self._record(self._unused.pop() if self._unused else None)
        except RuntimeError:  # device failure, which the script's next call will report
            return None

    def _finish(self, step: _QueuedStep, tally: Tally) -> None:
        tally.end_step(step.number, step.samples)
        for (_, begin), (phase, end) in pairwise(step.marks):
            elapsed_s = begin.elapsed_time(end) / 1e3
            tally.spent[phase] += max(elapsed_s, 0.0)  # streams may be out of order
            self._unused.append(begin)
        if step.then is not None:
            step.then()


class StepClock:
    """Accumulates the time of the steps until `take` is called."""

    def __init__(self) -> None:
        self.tally = Tally()  # device times if there is a queue, else host times
        self.phase, self.mark = SCRIPT, _now()
        self.due_at = 0.0  # time of the next record
        self.device: Any = None  # the `torch.device` used for training, once known
        self.queue: DeviceTimer | None = None  # for a device with timing events
        self.num_workers: int | None = None  # workers of the last batch's loader
        self.batch_samples = 0  # samples of the last batch on this rank
        self.num_samples = 0  # samples used by backward passes in this step
        self.device_bytes: Callable[[], int | None] = lambda: None  # None on a CPU
        self._waited_s = 0.0  # total wait for a core at the last record
        self._is_warm = False  # the first step, a warm-up, is done
        self.splits_backward = False  # whether `begin_exchange` must be called in this step
        self.split_at = float("inf")  # time after which a step's backward passes are split

    def watch_device(self, device: Any) -> None:
        """Time the work on `device`, with timing events if the device type supports them."""
        self.device, kind = device, kind_of(device.type)
        self.device_bytes = partial(kind.held_bytes, device)
        record = kind.event_recorder(device)
        self.queue = DeviceTimer(record) if record is not None else None

    def enter(self, phase: int) -> None:
        """Switch to `phase`."""
        now = _now()
        if self.queue is None:
            self.tally.spent[self.phase] += now - self.mark
        else:
            self.queue.mark(self.phase)
        self.mark, self.phase = now, phase

    @contextmanager
    def counting(self, phase: int) -> Iterator[None]:
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def begin_exchange(self) -> None:
        """Record that this rank has computed the last gradient of a backward pass.

        The rest of the backward pass counts as waiting for other ranks.
        """
        self.phase = GRADIENTS
        self.enter(EXCHANGE)

    def end_step(self, step: int) -> bool:
        """Record the end of an optimizer step; return whether a record is due."""
        self.enter(SCRIPT)
        samples, self.num_samples = self.num_samples, 0
        self.splits_backward = self.mark > self.split_at
        if self.splits_backward:
            self.split_at = self.mark + _SPLIT_EVERY_S
        if self.queue is None:
            self.tally.end_step(step, samples)
            self.tally.settled = self.tally.spent[:]
        else:
            self.queue.end_step(step, samples, self.tally)
        if not self._is_warm:
            self._is_warm, self._waited_s = True, _waited_s()
            self._begin_tally()
        return self.mark >= self.due_at

    def take(self, total: int, loss: float | None) -> StepStats | None:
        """Return the statistics of the steps since the last call; None if no step has finished.

        The first step, a warm-up, is excluded.
        """
        if not self.tally.num_steps:
            return None
        tally = self._begin_tally()
        for_core_s, self._waited_s = self._waited_s, _waited_s() or self._waited_s
        self.due_at = self.mark + _EVERY_S
        spent = tally.settled
        backward_s, waited_s = _split_backward(*spent[BACKWARD : EXCHANGE + 1])
        return StepStats(
            step=tally.step,
            num_steps=tally.num_steps,
            seconds=sum(spent),
            data_s=spent[DATA],
            forward_s=spent[FORWARD],
            backward_s=backward_s,
            sync_s=waited_s + spent[SYNC],
            save_s=spent[SAVE],
            samples=tally.samples,
            rss_bytes=_number_in("/proc/self/statm", 1) * os.sysconf("SC_PAGE_SIZE"),
            device_bytes=self.device_bytes(),
            total=total,
            loss=loss,
            num_workers=self.num_workers,
            stolen_s=max(self._waited_s - for_core_s, 0.0),
        )

    def _begin_tally(self) -> Tally:
        tally, self.tally = self.tally, Tally(self.tally.step)
        return tally


def _split_backward(whole_s: float, computed_s: float, waited_s: float) -> tuple[float, float]:
    """Return the compute and wait times of the backward passes.

    If only the total time of a pass is known, it is split in the same ratio as other passes.
    """
    known_s = computed_s + waited_s
    waited_s += whole_s * (waited_s / known_s if known_s else 0.0)
    return whole_s + known_s - waited_s, waited_s


def _waited_s() -> float:
    """Return how many seconds this thread was runnable but had no core; 0 if unknown.

    In that time, other processes used the core, or the cgroup's CPU quota was exhausted.
    Source: the kernel's sched-stats.rst.
    """
    return _number_in(_SCHEDSTAT, 1) / 1e9


def _number_in(path: str, index: int) -> int:
    try:
        with open(path, "rb") as file:
            return int(file.read().split()[index])
    except (OSError, ValueError, IndexError):
        return 0
