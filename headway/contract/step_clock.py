"""What this process's steps spend their time on: one clock, and the phase that it counts for.

Every moment between the ends of two optimizer steps counts for one phase. The parts of the runtime
switch the phase where they begin and end their work; a switch is one look at the clock. What a
script does between a batch and its backward pass is the forward pass.

On a GPU that times its own work, what counts is how long that took, not how long it took to queue.

Only the thread that trains is to call it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from headway.devices.kind import DeviceKind

SCRIPT, DATA, FORWARD, BACKWARD, SYNC, SAVE = range(6)
_NUM_PHASES = 6

_EVERY_S = 1.0
_MOST_MARKS = 256  # of a step, before those are read that its device has come to
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

    def moved_to(self, step: int, loss: float | None) -> Figures:
        """Return a record of no steps, which says how far the rank is by now."""
        spent = ("seconds", *(name for name in self._fields if name.endswith("_s")))
        none: dict[str, Any] = dict.fromkeys(spent, 0.0)
        return self._replace(**none, time=_epoch(), step=step, loss=loss, num_steps=0, samples=0)


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


class Event(Protocol):
    """A point in a device's queue of work, as `torch.cuda.Event(enable_timing=True)`."""

    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Event, /) -> float: ...  # in milliseconds


class _Timed:
    """A step that a device times, until it has finished it."""

    __slots__ = ("marks", "spent", "then")

    def __init__(self, begin: Event) -> None:
        self.marks = [(SCRIPT, begin)]  # phases with the events at their ends; the first begins it
        self.spent = [0.0] * _NUM_PHASES  # up to the first one of `marks`
        self.then: Callable[[], None] | None = None  # called at its end

    def read(self, unused: list[Event]) -> bool:
        """Add up what the device has come to; return whether that is the whole step."""
        done = 0
        while done + 1 < len(self.marks) and self.marks[done + 1][1].query():
            (_, begin), (phase, end) = self.marks[done : done + 2]
            self.spent[phase] += max(begin.elapsed_time(end), 0.0) / 1e3  # of two streams: any
            unused.append(begin)
            done += 1
        del self.marks[:done]
        return len(self.marks) == 1


class QueueTimes:
    """What a device takes for the work of each phase, by events between them in its queue.

    A device that waits for work, as for a batch, spends that time in the phase that it waits in.
    Events are read once the device has come to them, so it is never waited for.

    `record` puts an event into the queue, the given one again if there is one, and returns it; None
    where there can be none, as in a CUDA graph that is being captured: such a step is not timed.
    """

    def __init__(self, record: Callable[[Event | None], Event | None]) -> None:
        self._record = record
        self._unused: list[Event] = []
        self._step: _Timed | None = None  # that runs; None: it is not timed
        self._queued: deque[_Timed] = deque()  # the steps that were run before
        self._spent = [0.0] * _NUM_PHASES
        self._num_steps = 0  # that `_spent` is of
        self._has_failed = False

    def mark(self, phase: int) -> None:
        """Let the device's time since the last mark of this step count for `phase`."""
        step = self._step
        if step is not None:
            event = self._put()
            if event is None:
                self._step = None
                return
            step.marks.append((phase, event))
            if len(step.marks) % _MOST_MARKS == 0:  # as in an evaluation
                self._try(step.read)

    def end_step(self, phase: int) -> None:
        """End a step, whose last phase this was, and read those that the device has finished."""
        self.mark(phase)
        step, self._step = self._step, None
        if step is not None:
            self._queued.append(step)
            begin: Event | None = step.marks[-1][1]
            while self._queued and self._try(self._queued[0].read):
                self._finish(self._queued.popleft())
        else:
            begin = self._put()
        if begin is not None:
            self._step = _Timed(begin)

    def when_done(self, make_call: Callable[[], Callable[[], None]]) -> None:
        """Have what `make_call` returns called once the device has finished this step.

        It is made at once, and only if the step is timed: then no graph is being captured. While
        one waits to be called, no other is made.
        """
        step = self._step
        if step is not None and not any(one.then for one in (*self._queued, step)):
            step.then = make_call()

    def take(self) -> list[float] | None:
        """Return the mean step since the last time, in seconds of each phase; None without one."""
        if not self._num_steps:
            return None
        mean = [spent / self._num_steps for spent in self._spent]
        self._spent = [0.0] * _NUM_PHASES
        self._num_steps = 0
        return mean

    @property
    def num_behind(self) -> int:
        """How many steps will be timed that the device has not finished."""
        return len(self._queued)

    def _finish(self, step: _Timed) -> None:
        self._spent = [sum(pair) for pair in zip(self._spent, step.spent, strict=True)]
        self._num_steps += 1
        if step.then is not None:
            step.then()

    def _put(self) -> Event | None:
        if self._has_failed:
            return None
        try:
            return self._record(self._unused.pop() if self._unused else None)
        except RuntimeError:
            self._fail()
            return None

    def _try(self, read: Callable[[list[Event]], bool]) -> bool:
        try:
            return read(self._unused)
        except RuntimeError:
            self._fail()
            return False

    def _fail(self) -> None:
        """Time nothing more: the device has failed, which the script's next call will tell it."""
        self._has_failed = True
        self._step = None
        self._queued.clear()
        self.take()


class StepClock:
    """Adds up what steps take, until `take`."""

    __slots__ = (
        *("is_on", "spent", "phase", "mark", "num_steps", "last_step", "due_at", "queue", "device"),
        *("num_workers", "batch_samples", "num_samples", "lost_time", "device_bytes"),
    )

    def __init__(self) -> None:
        self.is_on = False  # somebody reads; before, what each step pays for need not be called
        self.spent = [0.0] * _NUM_PHASES
        self.phase, self.mark = SCRIPT, _now()
        self.num_steps = 0  # since the last record
        self.last_step = -1  # the number of the last one in a record; -1 before the first
        self.due_at = 0.0  # the next record
        self.device: Any = None  # the `torch.device` of the training, once it is known
        self.queue: QueueTimes | None = None  # of the device, which then counts instead of `spent`
        self.num_workers: int | None = None  # of the loader that gave the last batch
        self.batch_samples = 0  # of this rank, in the batch that the loader gave last
        self.num_samples = 0  # that backward passes have used since the last record
        self.lost_time = LostTime()  # of the thread that trains
        self.device_bytes: Callable[[], int | None] = lambda: None  # of this process; None: a CPU

    def begin(self) -> None:
        """Have records become due from the second step on: the first one warms up."""
        self.is_on = True

    def watch_device(self, kind: DeviceKind, device: Any) -> None:
        """Let the figures be those of a training on a `torch.device` of this kind."""
        self.device = device
        self.device_bytes = partial(kind.held_bytes, device)
        record = kind.event_recorder(device)
        self.queue = QueueTimes(record) if record is not None else None

    def switch(self, phase: int) -> int:
        """Let the time from now on count for `phase`; return for which it counted before."""
        now, before = _now(), self.phase
        self.spent[before] += now - self.mark
        self.mark, self.phase = now, phase
        if self.queue is not None:
            self.queue.mark(before)
        return before

    def begin_exchange(self) -> None:
        """Note that this rank has computed a gradient, which may be the last one.

        What follows is waiting for other ranks, unless this is called again in the same pass.
        """
        now, before = _now(), BACKWARD if self.phase == SYNC else self.phase
        self.spent[before] += now - self.mark
        self.mark, self.phase = now, SYNC
        if self.queue is not None:
            self.queue.mark(before)

    def end_backward(self) -> None:
        """Note the end of a backward pass, and the samples of its batch."""
        self.switch(SCRIPT)
        self.num_samples += self.batch_samples
        self.batch_samples = 0

    def end_step(self) -> bool:
        """Note the end of an optimizer step; return whether a record of the steps is due."""
        now, before = _now(), self.phase
        self.spent[before] += now - self.mark
        self.mark, self.phase = now, SCRIPT
        if self.queue is not None and self.is_on:
            self.queue.end_step(before)
        self.num_steps += 1
        return self.is_on and now >= self.due_at

    def take(self, step: int, total: int, loss: float | None) -> Figures | None:
        """Return the figures of the steps up to this one since the last time.

        None at first, and while a device has not finished a step since.
        """
        num_ends, num_told = self.num_steps, self.num_steps
        if self.queue is not None:  # it times the steps after the first one
            num_told -= self.queue.num_behind
            if (mean := self.queue.take()) is not None:
                self.spent[:] = [num_told * spent for spent in mean]
            elif num_told < num_ends:
                return None
        is_first, lost = self.last_step < 0, self.lost_time.take()
        all_steps = min(max(step - self.last_step, 1), num_ends)
        num_steps = max(round(all_steps * num_told / num_ends), 1)
        num_samples = round(self.num_samples * num_told / num_ends)
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
            samples=num_samples,
            rss_bytes=_rss_bytes(),
            device_bytes=self.device_bytes(),
            total=total,
            loss=loss,
            num_workers=self.num_workers,
            stolen_s=lost.stolen,
            throttled_s=lost.throttled,
        )
        self.spent[:] = [0.0] * _NUM_PHASES
        self.num_steps -= num_told
        self.num_samples -= num_samples
        self.last_step = step - (all_steps - num_steps)
        self.due_at = 0.0 if is_first else self.mark + _EVERY_S
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
