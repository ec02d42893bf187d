"""Training progress in this process, sent to the launcher through the status channel.

All parts of an Accelerator share the `Progress` of their `Training`. They check `is_watched` before
each call, so an unwatched step costs only that check.
"""

from __future__ import annotations

import _thread
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from headway.ipc.records import FeatureUse, OutputPath, ProgressSnapshot, Record, StepStats
from headway.ipc.stderr import log_once
from headway.ipc.step_clock import FORWARD, NAMES, SAVE, SCRIPT, StepClock
from headway.ipc.typed import encode

_BEAT_EVERY_S = 1.0  # limits the cost of heartbeats if steps are short
_write = os.write  # a script may replace it

_SAVING = ("checkpoint", "save_state")
WRITER = "headway-checkpoint"
"""Name of the thread that writes a checkpoint in the background."""


def identity(fd: int) -> tuple[int, int] | None:
    """Return the device and inode of an open file, pipe or socket; None if it is closed."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class Channel:
    """This process's end of the status channel; disabled in forked children."""

    def __init__(self, fd: int) -> None:
        self.fd, self._identity = fd, identity(fd)
        self._pid = os.getpid()
        self._lock = _thread.RLock()  # not a Lock: the script's signal handler may send

    @property
    def is_open(self) -> bool:
        """Whether records can be sent.

        They cannot be sent if the script closed the descriptor, even if another file now has its
        number.
        """
        return os.getpid() == self._pid and identity(self.fd) == self._identity

    def send(self, record: Record) -> None:
        """Send one record; ignore errors."""
        with suppress(Exception):  # the launcher exited, or the script replaced a function
            if self.is_open:
                line = memoryview(encode(record))
                with self._lock:  # a long record is written in parts
                    while line:
                        line = line[_write(self.fd, line) :]


class Progress:
    """Phase and position of the training in this process, and the features that it uses.

    Attributes:
        is_watched: whether there is a listener; if not, phases and steps need not be recorded.
        step: completed optimizer steps of the training run, if watched.
        total: total steps of the training run; 0 if unknown.
        loss: the most recent loss.
        num_trained: number of backward passes and optimizer steps in this process; never reset.
        clock: accumulates the time of each phase.
        listeners: called with the step statistics about once a second.
        feature_use: the launcher's features that the program has used so far.
        output_paths: the last path of each kind of `OutputPath`.
        own_threads: threads of the runtime, omitted from reports.
        channel: the connection to the launcher; None without a launcher.
        has_own_seed: whether the script set a different seed on each rank.
        may_be_killed: returns whether the process can be killed without losing work; thread-safe.
    """

    def __reduce__(self) -> tuple[Any, ...]:  # the script may copy or pickle this object
        return process_progress, ()

    def __init__(self) -> None:
        self.is_watched = False
        self.step, _, self.total, self.loss = ProgressSnapshot()
        self._call = ""  # the running method, one of `records.CALLED_BY_ALL_RANKS`
        self.num_trained = 0
        self.clock = StepClock()
        self.listeners: list[Callable[[StepStats], None]] = []
        self.feature_use = FeatureUse()
        self.output_paths: dict[str, str] = {}
        self.own_threads: set[int] = set()
        self.channel: Channel | None = None
        self.may_be_killed: Callable[[], bool] = bool
        self.has_own_seed = False
        self._beat_at = float("inf")  # clock time of the next heartbeat
        self._stats: StepStats | None = None  # the last reported stats
        self._saved = (0, 0.0)  # the last save's step and duration in seconds

    # ------------------------------------------------------------------ the launcher

    def connect(self, channel: Channel) -> None:
        """Start sending records to a launcher."""
        self.channel = channel
        self._beat_at = 0.0
        self.report_to(self.send)

    @property
    def is_connected(self) -> bool:
        return self.channel is not None and self.channel.is_open

    def send(self, record: Record) -> None:
        if self.channel is not None:
            self.channel.send(record)

    def report_to(self, listener: Callable[[StepStats], None]) -> None:
        """Time the steps and pass their statistics to `listener` about once a second."""
        self.listeners.append(listener)
        self.is_watched = True

    def snapshot(self) -> ProgressSnapshot:
        return ProgressSnapshot(self.step, self.phase, self.total, self.loss)

    # ------------------------------------------------------------------ the training

    @property
    def phase(self) -> str:
        """The method that all ranks are calling or, if there is none, the phase of the clock."""
        return self._call or NAMES[self.clock.phase]

    def begin_forward(self, samples: int) -> None:
        """Record that the loader yields a batch of `samples` samples on this rank."""
        clock = self.clock
        clock.enter(FORWARD)
        clock.batch_samples = samples
        if clock.mark > self._beat_at:
            self._beat()

    def end_backward(self) -> None:
        """Record the end of a backward pass and count the samples of its batch."""
        clock = self.clock
        clock.enter(SCRIPT)
        clock.num_samples += clock.batch_samples
        clock.batch_samples = 0
        if clock.mark > self._beat_at:
            self._beat()

    def end_step(self, step: int) -> None:
        """Record that optimizer step number `step` is done; report statistics if they are due.

        Statistics replace heartbeats, so at most one record is sent per second.
        """
        self.step = step
        clock = self.clock
        if clock.end_step(step) and (stats := clock.take(self.total, self.loss)) is not None:
            self._report(stats)
            self._beat_at = clock.mark + 2 * _BEAT_EVERY_S
        elif clock.mark > self._beat_at:
            self._beat()

    def follow(self, step: int, total: int, loss: float | None) -> None:
        """Record the position of a library's training loop at the end of a step."""
        self.step, self.total, self.loss = step, total, loss
        if self.is_watched:
            self.end_step(step)

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Set the phase to `name`, one of `records.CALLED_BY_ALL_RANKS`, during the block."""
        before, self._call = self._call, name
        clock = self.clock
        try:
            with clock.counting(SAVE if name in _SAVING else clock.phase):
                began_at = clock.mark
                yield
        finally:
            self._call = before
            if name in _SAVING:
                step, saved_s = self._saved
                saved_s = saved_s * (step == self.step) + clock.mark - began_at
                self._saved = (self.step, saved_s)

    @property
    def is_saving(self) -> bool:
        import threading  # not imported on the launch path

        writers = (thread for thread in threading.enumerate() if thread.name == WRITER)
        return self._call in _SAVING or any(writers)

    def note_use(self, **used: Any) -> None:
        self.feature_use = self.feature_use._replace(**used)

    def log_note(self, text: str) -> None:
        """Log a note once; the launcher repeats it after a successful run."""
        log_once(f"note: {text}")
        self.note_use(notes=tuple(dict.fromkeys((*self.feature_use.notes, text))))

    def note_output_path(self, what: str, path: str) -> None:
        path = os.path.abspath(path)
        if self.output_paths.get(what) != path:
            self.output_paths[what] = path
            self.send(OutputPath(what, path))

    # ------------------------------------------------------------------ reports

    def finish(self) -> None:
        """Report the last steps, and the saves that follow them, at the end of the program."""
        if (stats := self.clock.take(self.total, self.loss)) is not None:
            self._report(stats)
        step, saved_s = self._saved
        if self._stats is not None and step == self.step:
            self._report(self._stats.empty_at(step, self.loss)._replace(save_s=saved_s))
            self._saved = (0, 0.0)

    def _report(self, stats: StepStats) -> None:
        self._stats = stats
        for listener in self.listeners:
            listener(stats)

    def _beat(self) -> None:
        self._beat_at = self.clock.mark + _BEAT_EVERY_S
        self.send(self.snapshot())


_progress = Progress()


def process_progress() -> Progress:
    """Return the progress of this process.

    The rank connects it to the launcher before the script starts. It is used by torch hooks,
    library callbacks and functions without an Accelerator.
    """
    return _progress
