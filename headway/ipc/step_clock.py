"""What this process's steps spend their time on: one clock, and the phase that it counts for.

Every moment between the ends of two optimizer steps counts for one phase. The parts of the runtime
switch the phase where they begin and end their work. What a script does between a batch and its
backward pass is the forward pass.

On a GPU that times its own work, what counts is how long that took, not how long it took to queue:
a step is reported once the device has finished it.

Only the thread that trains is to call it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from headway.ipc.records import Figures

if TYPE_CHECKING:
    from headway.devices.kind import DeviceKind

SCRIPT, DATA, FORWARD, BACKWARD, GRADIENTS, EXCHANGE, SYNC, SAVE = range(8)
NAMES = ("script", "data", "script", *("backward",) * 3, "script", "script")
"""The phases as the launcher shows them; in the forward pass, the script is running.

A backward pass is one phase, or two where it is known when its last gradient was computed.
"""

_EVERY_S = 1.0
_MOST_MARKS = 4096  # of a step that a device times
_WAITED = "/proc/thread-self/schedstat"
_now = time.perf_counter  # a script may replace it


class Event(Protocol):
    """A point in a device's queue of work, as `torch.cuda.Event(enable_timing=True)`."""

    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Event, /) -> float: ...  # in milliseconds


class Tally:
    """Timing of consecutive steps.

    Steps of several optimizers with the same number are one step.
    """

    __slots__ = ("num_steps", "samples", "settled", "spent", "step")

    def __init__(self, step: int = -1) -> None:
        self.step = step  # the number of the last one
        self.num_steps = 0
        self.samples = 0
        self.spent = [0.0] * len(NAMES)  # seconds of each phase
        self.settled = self.spent  # without those of a running step

    def end_step(self, number: int, samples: int) -> None:
        self.num_steps += number != self.step
        self.step = number
        self.samples += samples


class _Queued(NamedTuple):
    number: int
    samples: int
    marks: list[tuple[int, Event]]  # phases with the events at their ends; the first begins it
    then: Callable[[], None] | None  # called once the device has finished it


class QueueTimes:
    """What a device takes for the work of each phase, by events between them in its queue.

    A device that waits for work, as for a batch, spends that time in the phase that it waits in.
    Only finished steps are read, so the device is never waited for. A step of very many phases, as
    with an evaluation, is not timed.

    `record` puts an event into the queue, the given one again if there is one, and returns it; None
    where there can be none, as in a CUDA graph that is being captured: such a step is not timed.
    Nor is one of a device that has failed, of which it raises RuntimeError.
    """

    def __init__(self, record: Callable[[Event | None], Event | None]) -> None:
        self._record = record
        self._unused: list[Event] = []
        self._marks: list[tuple[int, Event]] = []  # of the running step; empty: it is not timed
        self._then: Callable[[], None] | None = None
        self._queued: deque[_Queued] = deque()

    def mark(self, phase: int) -> None:
        """Count the device's time since the last mark of this step for `phase`."""
        if self._marks:
            event = self._put()
            if event is None or len(self._marks) == _MOST_MARKS:
                self._marks = []
            else:
                self._marks.append((phase, event))

    def end_step(self, number: int, samples: int, tally: Tally) -> None:
        """End a step after its last mark, and add those that the device has finished to `tally`."""
        marks, then, self._then = self._marks, self._then, None
        begin = marks[-1][1] if marks else self._put()
        if marks:
            self._queued.append(_Queued(number, samples, marks, then))
            with suppress(RuntimeError):  # the device has failed, as in `_put`
                while self._queued and self._queued[0].marks[-1][1].query():
                    self._finish(self._queued.popleft(), tally)
        self._marks = [] if begin is None else [(SCRIPT, begin)]

    def when_done(self, make_call: Callable[[], Callable[[], None]]) -> None:
        """Call what `make_call` returns once the device has finished this step.

        `make_call` runs at once, and only if the step is timed: then no graph is being captured.
        """
        if self._marks:
            self._then = make_call()

    def _put(self) -> Event | None:
        try:
            return self._record(self._unused.pop() if self._unused else None)
        except RuntimeError:  # the device has failed, as the script's next call will report
            return None

    def _finish(self, step: _Queued, tally: Tally) -> None:
        tally.end_step(step.number, step.samples)
        for (_, begin), (phase, end) in pairwise(step.marks):
            taken_s = begin.elapsed_time(end) / 1e3
            tally.spent[phase] += max(taken_s, 0.0)  # of two streams: any
            self._unused.append(begin)
        if step.then is not None:
            step.then()


class StepClock:
    """Adds up what steps take, until `take`."""

    __slots__ = (
        *("tally", "spent", "phase", "mark", "due_at", "queue", "device", "num_workers"),
        *("batch_samples", "num_samples", "device_bytes", "_waited_s", "_is_warm"),
    )

    def __init__(self) -> None:
        self.tally = Tally()  # by the queue's times, where there is one, else by the script's
        self.spent = self.tally.spent
        self.phase, self.mark = SCRIPT, _now()
        self.due_at = 0.0  # the next record
        self.device: Any = None  # the `torch.device` of the training, once it is known
        self.queue: QueueTimes | None = None  # of a device that times its own work
        self.num_workers: int | None = None  # of the loader that gave the last batch
        self.batch_samples = 0  # of this rank, in the batch that the loader gave last
        self.num_samples = 0  # that backward passes have used in this step
        self.device_bytes: Callable[[], int | None] = lambda: None  # of this process; None: a CPU
        self._waited_s = 0.0  # for a core, when the last record was taken
        self._is_warm = False  # the first step, which warms up, is over

    def watch_device(self, kind: DeviceKind, device: Any) -> None:
        """Time the work of a `torch.device` of this kind, where it can be timed."""
        self.device = device
        self.device_bytes = partial(kind.held_bytes, device)
        record = kind.event_recorder(device)
        self.queue = QueueTimes(record) if record is not None else None

    def enter(self, phase: int) -> None:
        """Count the time from now on for `phase`."""
        now = _now()
        if self.queue is None:
            self.spent[self.phase] += now - self.mark
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
        """Note that this rank has computed a gradient, which may be the last one.

        What follows is waiting for other ranks, unless this is called again in the same pass.
        """
        self.phase = GRADIENTS
        self.enter(EXCHANGE)

    def end_step(self, step: int) -> bool:
        """Note the end of an optimizer step; return whether a record of the steps is due."""
        self.enter(SCRIPT)
        samples, self.num_samples = self.num_samples, 0
        if self.queue is None:
            self.tally.end_step(step, samples)
            self.tally.settled = self.spent[:]
        else:
            self.queue.end_step(step, samples, self.tally)
        if not self._is_warm:
            self._is_warm, self._waited_s = True, _waited_s()
            self._begin_tally()
        return self.mark >= self.due_at

    def take(self, total: int, loss: float | None) -> Figures | None:
        """Return the figures of the steps finished since the last call, None without any.

        The first step, which warms up, is excluded.
        """
        if not self.tally.num_steps:
            return None
        tally = self._begin_tally()
        for_core_s, self._waited_s = self._waited_s, _waited_s() or self._waited_s
        self.due_at = self.mark + _EVERY_S
        spent = tally.settled
        backward_s, waited_s = _split_backward(*spent[BACKWARD : EXCHANGE + 1])
        return Figures(
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
        """Start a new tally and return the old one."""
        tally, self.tally = self.tally, Tally(self.tally.step)
        self.spent = self.tally.spent
        return tally


def _split_backward(whole_s: float, computed_s: float, waited_s: float) -> tuple[float, float]:
    """Return the time that backward passes computed and waited.

    Passes of which only the whole is known have waited as the others did.
    """
    known_s = computed_s + waited_s
    waited_s += whole_s * (waited_s / known_s if known_s else 0.0)
    return whole_s + known_s - waited_s, waited_s


def _waited_s() -> float:
    """Return how long this thread was ready to run without a core; 0 if unknown.

    Other processes have its core then, or the CPU quota of its cgroup is used up.
    Source: the kernel's sched-stats.rst.
    """
    return _number_in(_WAITED, 1) / 1e9


def _number_in(path: str, index: int) -> int:
    try:
        with open(path, "rb") as file:
            return int(file.read().split()[index])
    except (OSError, ValueError, IndexError):
        return 0
