"""The records that a rank sends its launcher, one JSON line each, through the status channel.

The records are NamedTuples: ranks import this module before the user's script, and `dataclasses`
would also import `inspect`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

from headway.ipc.stderr import shown
from headway.ipc.typed import Lines, TooLong, decode, kinds_of

STOPPED_AND_SAVED = 75
"""The exit code of a rank for: stopped by request, state saved, run me again. No failure."""

REPEATED = 76
"""The exit code of a launcher for: failed as the time before, do not run me again."""

CALLED_BY_ALL_RANKS = ("checkpoint", "should_stop", "save_state", "load_state", "resume")
"""The Accelerator's methods that wait for all ranks; each is a phase while a rank is in it."""

_LONGEST_NAME = 200  # characters of an exception's class in a message
_LONGEST_LINE = 2**24  # bytes; a longer line is refused


class Frame(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return shown(f"{self.file}:{self.line} in {self.function}")


class Collective(NamedTuple):
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
        """The number of the last collective that the rank has entered; 0 for none."""
        return max((call.number for call in self.collectives), default=0)

    @property
    def waits_for(self) -> int | None:
        """The number of the first collective that is not done, or None."""
        return min((call.number for call in self.collectives if not call.is_done), default=None)

    def collective(self, number: int) -> Collective | None:
        found = [call for call in self.collectives if call.number == number]
        return found[-1] if found else None


class ProgressSnapshot(NamedTuple):
    step: int = 0  # optimizer steps done
    phase: str = "script"  # what the runtime is doing; script: the user's code runs
    total: int = 0  # steps that the training will have; 0: not known
    loss: float | None = None  # the last known one


class RankReady(NamedTuple):
    """The rank is about to run the script, and sends a `StatusReply` when it is asked."""


class WillSave(NamedTuple):
    """Whether the rank, on request to stop, will save after its step and then exit."""

    is_so: bool = True


PROJECT, CHECKPOINTS, METRICS, LOGS = "project", "checkpoints", "metrics", "logs"
"""What `Kept` says that a path leads to."""


class Kept(NamedTuple):
    """Where something of the run is kept: its project, its checkpoints, its metrics, its logs."""

    what: str  # PROJECT, CHECKPOINTS, METRICS (a file of the jsonl tracker) or LOGS
    path: str


class Heartbeat(NamedTuple):
    """The runtime makes progress; sent at most once a second."""

    progress: ProgressSnapshot


class Figures(NamedTuple):
    """Timing of one rank's optimizer steps since its last such record, for its launcher."""

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
    stolen_s: float = 0.0  # of `seconds`, ready to compute without a core; 0: not known

    @property
    def counts_training(self) -> bool:
        """Whether its steps are numbered over the whole training, and not in this process only."""
        return bool(self.total or self.data_s or self.forward_s or self.backward_s)

    def moved_to(self, step: int, loss: float | None) -> Figures:
        """Return a record without steps, with the current position."""
        spent = ("seconds", *(name for name in self._fields if name.endswith("_s")))
        none: dict[str, Any] = dict.fromkeys(spent, 0.0)
        return self._replace(**none, step=step, loss=loss, num_steps=0, samples=0)


class StatusReply(NamedTuple):
    """The current position of the rank."""

    groups: tuple[Group, ...]
    progress: ProgressSnapshot
    num_modules: int  # that have been imported, or are being imported
    stacks: tuple[tuple[Frame, ...], ...]  # the main thread's first; the most recent call last
    may_be_killed: bool = False  # it would lose nothing: Headway's handler is the only one


class CrashSite(NamedTuple):
    """What a failure by an exception has in common with its repetition."""

    kind: str  # the exception's class
    message: str  # a digest, as it may hold secrets
    frame: Frame  # the script's line
    step: int  # optimizer steps of the training that were done


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
    step: int = 0  # steps of the training that were done; 0: none, or not known

    @property
    def name(self) -> str:
        """The exception's class, for a message."""
        return shown(self.kind[:_LONGEST_NAME])


class Uses(NamedTuple):
    """Which of the launcher's settings a rank's program has used in its process."""

    accelerator: bool = False  # it made an Accelerator
    group: bool = False  # it joined a process group of torch's
    readers: tuple[str, ...] = ()  # modules that it imported, which read the launcher's variables
    resuming: bool = False  # it goes on from a checkpoint, where there is one
    stopping: bool = False  # it saves and leaves when the job has to stop


class ScriptEnd(NamedTuple):
    """A rank's program ended by itself; not sent after os._exit."""

    time: float  # seconds since the epoch
    code: int  # the exit code that follows
    message: str = ""  # the text of sys.exit("text")
    exited_at: Frame | None = None  # the call of sys.exit; None: the end of the script
    groups: tuple[Group, ...] = ()
    uses: Uses | None = None


class Serving(NamedTuple):
    """The fork server has started."""

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
    leftovers: bool  # no rank runs any more, but something that a rank has started does


Record = (RankReady | WillSave | Kept | Heartbeat | Figures | StatusReply | Crash | ScriptEnd) | (
    Serving | Started | NotStarted | Ended
)

_RECORDS = kinds_of(*get_args(Record))


class InvalidRecord(NamedTuple):
    """A line that is not a record: a script may write to any descriptor."""

    reason: str


class RecordReader:
    """Reads the records in the data of one status channel."""

    def __init__(self) -> None:
        self._lines = Lines(_LONGEST_LINE)

    def read(self, data: bytes) -> Iterator[Record | InvalidRecord]:
        """Yield the records or refused lines that `data` completes."""
        try:
            for line in self._lines.feed(data):
                yield decode_record(line)
        except TooLong as error:
            yield InvalidRecord(str(error))


def decode_record(line: bytes) -> Record | InvalidRecord:
    try:
        record: Record = decode(_RECORDS, line)
        return record
    except ValueError as error:
        return InvalidRecord(str(error))
