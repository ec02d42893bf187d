"""The records that a rank sends its launcher, one JSON line each, through the status channel.

Without a launcher nothing is sent, at almost no cost. The records are NamedTuples:
ranks import this module before the user's script, and `dataclasses` would also import `inspect`.
"""

from __future__ import annotations

import _thread
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, get_args

from headway.contract.lines import Lines, TooLong, decode, encode, kinds_of
from headway.contract.step_clock import SAVE, Figures, clock

STOPPED_AND_SAVED = 75
"""The exit code of a rank for: stopped by request, state saved, run me again. No failure."""

_BEAT_EVERY_S = 1.0
_write, _monotonic = os.write, time.monotonic  # a script may replace them
_LONGEST_NAME = 200  # characters of an exception's class in a message
_LONGEST_LINE = 2**24  # bytes; a longer line is refused


def shown(text: str) -> str:
    """Return text from a script for one line of a message: control characters as escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


class Frame(NamedTuple):
    """One call of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return shown(f"{self.file}:{self.line} in {self.function}")


class Collective(NamedTuple):
    """A collective operation that a rank has entered."""

    number: int  # torch's sequence number in its process group
    name: str
    input_sizes: str
    is_done: bool
    entered_at: float  # seconds since the epoch


OF_HEADWAY = "headway"
"""The name of a group whose collectives are the runtime's calls that wait for all ranks."""


class Group(NamedTuple):
    """A process group as one of its ranks sees it."""

    name: str
    ranks: tuple[int, ...] | None  # global ranks of the members; None if torch dropped them
    collectives: tuple[Collective, ...]  # the most recent ones, the oldest first

    @property
    def last_entered(self) -> int:
        """The sequence number of the last collective that the rank has entered; 0 for none."""
        return max((one.number for one in self.collectives), default=0)

    @property
    def waits_for(self) -> int | None:
        """The sequence number of the first collective that is not done, or None."""
        return min((one.number for one in self.collectives if not one.is_done), default=None)

    def collective(self, number: int) -> Collective | None:
        """Return the collective with this sequence number."""
        found = [one for one in self.collectives if one.number == number]
        return found[-1] if found else None


class Progress(NamedTuple):
    """The progress of training."""

    step: int = 0  # optimizer steps done
    phase: str = "script"  # what the runtime is doing; script: the user's code runs
    total: int = 0  # steps that the training will have; 0: nobody has told
    loss: float | None = None  # the last one that is known


class Ready(NamedTuple):
    """The rank is about to run the script, and sends an `Answer` to messages on the channel."""


class WillSave(NamedTuple):
    """Asked to stop, the rank will save after its step, and then leave."""


CHECKPOINTS, METRICS, LOGS = "checkpoints", "metrics", "logs"
"""What `Kept` says that a path leads to."""


class Kept(NamedTuple):
    """Where something of the run is kept: its checkpoints, its metrics, its logs."""

    what: str  # CHECKPOINTS, METRICS (a file of the jsonl tracker) or LOGS
    path: str


class Heartbeat(NamedTuple):
    """The runtime makes progress; sent at most once a second."""

    progress: Progress


class Answer(NamedTuple):
    """Where the rank is."""

    time: float  # on the system's monotonic clock, before the rest was read
    groups: tuple[Group, ...]
    progress: Progress
    num_modules: int  # that have been imported, or are being imported
    stacks: tuple[tuple[Frame, ...], ...]  # the main thread's first; the most recent call last
    handles_quit: bool  # the script has its own handler of SIGQUIT


class Crash(NamedTuple):
    """How an unhandled exception ended a rank's program."""

    time: float  # seconds since the epoch
    kind: str  # the exception's class
    message: str
    traceback: str  # as Python prints it, without the launcher's frames
    is_from_torch: bool = False  # it was raised in a file of torch's
    code: int = 1  # the exit code that follows; negative for a signal
    groups: tuple[Group, ...] = ()
    is_from_headway: bool = False  # it was raised in a file of Headway's, and not on purpose
    fix: str = ""  # of an error that Headway raised on purpose; `traceback` is without it

    @property
    def name(self) -> str:
        """The exception's class, for a message."""
        return shown(self.kind[:_LONGEST_NAME])


class Uses(NamedTuple):
    """What a rank's program has used of what the launcher sets, in its own process."""

    accelerator: bool  # it made an Accelerator
    group: bool  # it joined a process group of torch's
    readers: tuple[str, ...] = ()  # modules that it imported, which read the launcher's variables
    resuming: bool = False  # it goes on from a checkpoint, where there is one
    stopping: bool = False  # it saves and leaves when the job has to stop


class MemoryUse(NamedTuple):
    """The most that torch has held of one GPU's memory in a process, in bytes."""

    allocated: int  # by tensors
    reserved: int  # by the allocator, for them


class End(NamedTuple):
    """A rank's program ended by itself; not sent after os._exit."""

    time: float  # seconds since the epoch
    code: int  # the exit code that follows
    message: str = ""  # the text of sys.exit("text")
    exited_at: Frame | None = None  # the call of sys.exit; None: the end of the script
    groups: tuple[Group, ...] = ()
    uses: Uses | None = None
    memory: MemoryUse | None = None  # None where it has used no GPU


class Serving(NamedTuple):
    """The fork server has begun."""

    pid: int


class Started(NamedTuple):
    """The fork server has started a rank."""

    pid: int


class NotStarted(NamedTuple):
    """The fork server could not start a rank."""

    errno: int  # the operating system's reason


class Ended(NamedTuple):
    """A rank's process has ended; sent by the fork server."""

    pid: int
    code: int  # negative for a signal, as `subprocess` gives it
    time: float  # seconds since the epoch
    left_processes: bool  # no rank runs any more, but something that a rank has started does


Record = (Ready | WillSave | Kept | Heartbeat | Figures | Answer | Crash | End) | (
    Serving | Started | NotStarted | Ended
)

_RECORDS = kinds_of(*get_args(Record))


class Refused(NamedTuple):
    """A line that is not a record: a script may write to any descriptor."""

    reason: str


class Channel:
    """This process's end of the status channel, and what it tells of the program.

    The runtime sets `phase` and `step` directly, several times in each training step: a function
    call would cost as much as all the rest. It calls `beat()` if `fd` is not None.
    """

    __slots__ = (
        *("fd", "identity", "last_sent_at", "num_trained", "phase", "step", "total", "loss"),
        *("has_joined_group", "has_made_accelerator", "has_resumed", "obeys_stops", "will_save"),
        *("listeners", "kept"),
    )

    def __init__(self) -> None:
        self.fd: int | None = None
        self.identity: tuple[int, int] | None = None  # of the file that `fd` was opened for
        self.last_sent_at = 0.0  # when the last heartbeat was sent, on the monotonic clock
        self.step, self.phase, self.total, self.loss = Progress()
        self.num_trained = 0  # backward passes and optimizer steps of this process; never set back
        self.has_joined_group = False
        self.has_made_accelerator = False
        self.has_resumed = False
        self.obeys_stops = False  # the script has asked whether the job has to stop
        self.will_save = False  # when it is asked to stop
        self.listeners: list[Callable[[Figures], None]] = []  # of the figures of this process
        self.kept: dict[str, str] = {}  # the last path of each kind that `Kept` has


CALLED_BY_ALL_RANKS = ("checkpoint", "should_stop", "save_state", "load_state", "resume")
"""The Accelerator's methods that wait for all ranks; each is a phase while a rank is in it."""

_SAVING = ("checkpoint", "save_state")


@contextmanager
def in_phase(phase: str) -> Iterator[None]:
    """Let this process's progress tell the phase in the block."""
    before, channel.phase = channel.phase, phase
    counted = clock.switch(SAVE if phase in _SAVING else clock.phase)
    try:
        yield
    finally:
        channel.phase = before
        clock.switch(counted)


own_threads: set[int] = set()
"""Threads of the runtime that are in no report."""

_sending = _thread.RLock()  # not a Lock: a signal handler of the script may send as well
channel = Channel()  # an instance: Python forgets its caches whenever a class attribute is set


def open_channel(fd: int) -> None:
    """Send this process's records to `fd`; forked children send none."""
    channel.fd, channel.identity, channel.listeners = fd, identity(fd), [send]
    clock.begin()
    os.register_at_fork(after_in_child=_close_channel)


def _close_channel() -> None:
    channel.fd = None


def identity(fd: int) -> tuple[int, int] | None:
    """Return the device and inode of an open file, pipe or socket; None if it is closed."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def is_connected() -> bool:
    """Return whether the channel to a launcher is open.

    A script may close descriptors that it did not open, and reuse their numbers.
    """
    if channel.fd is not None and identity(channel.fd) != channel.identity:
        channel.fd = None
    return channel.fd is not None


def send(record: Record) -> None:
    """Send one record, if there is a launcher; what goes wrong is not the script's problem."""
    with suppress(Exception):  # the launcher has ended, or the script has replaced a function
        if is_connected():
            assert channel.fd is not None
            line = memoryview(encode(record))
            with _sending:  # a long record is written in parts
                while line:
                    line = line[_write(channel.fd, line) :]


def progress() -> Progress:
    return Progress(channel.step, channel.phase, channel.total, channel.loss)


def report(step: int, total: int, loss: float | None) -> None:
    """Note how far a library's training is, and tell the launcher, at most once each second."""
    channel.step, channel.total, channel.loss = step, total, loss
    if clock.end_step():
        tell_figures()
    elif channel.fd is not None:
        beat()


def tell_figures() -> None:
    """Tell what the steps took since the last time; called where `clock` says that it is due.

    A heartbeat is sent only if no step ends for longer: at most one record each second.
    """
    figures = clock.take(channel.step, channel.total, channel.loss)
    if figures is None:  # a device is behind
        beat()
    else:
        for listener in channel.listeners:
            listener(figures)
        channel.last_sent_at = _monotonic() + _BEAT_EVERY_S


def beat() -> None:
    """Send a heartbeat, at most one each second."""
    now = _monotonic()
    if now - channel.last_sent_at > _BEAT_EVERY_S:
        channel.last_sent_at = now
        send(Heartbeat(progress()))


def report_kept(what: str, path: str) -> None:
    """Report to the launcher, and to this process's own record, where something is kept."""
    path = os.path.abspath(path)
    if channel.kept.get(what) != path:
        channel.kept[what] = path
        send(Kept(what, path))


class RecordReader:
    """Reads the records in the data of one status channel, where a line may come in many parts."""

    def __init__(self) -> None:
        self._lines = Lines(_LONGEST_LINE)

    def read(self, data: bytes) -> Iterator[Record | Refused]:
        """Yield what the lines that `data` completes are."""
        try:
            for line in self._lines.feed(data):
                yield decode_record(line)
        except TooLong as error:
            yield Refused(str(error))


def decode_record(line: bytes) -> Record | Refused:
    """Return the record in a line; every value must be there, and of its declared type."""
    try:
        record: Record = decode(_RECORDS, line)
        return record
    except ValueError as error:
        return Refused(str(error))
