"""The records that a rank sends to its launcher through the status channel, one JSON line each.

They are NamedTuples because ranks import this module before the user's script, and importing
`dataclasses` would also import `inspect`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from headway.ipc.stderr import shown
from headway.ipc.typed import Lines, TooLong, decode

STOPPED_AND_SAVED = 75
"""A rank's exit code after it saved and stopped on request. The job can be rerun."""

SAVED = "saved and stopped"
"""The report of a run that saved after Ctrl-C; its exit code is that of SIGINT."""

REPEATED = 76
"""A launcher's exit code if the run failed in the same way again; another run would not help."""

CALLED_BY_ALL_RANKS = ("checkpoint", "should_stop", "save_state", "load_state", "resume")
"""Accelerator methods that wait for all ranks; each is shown as a phase while it runs."""

_MAX_NAME = 200  # maximum length of an exception's class name in a message
_MAX_LINE = 2**24  # bytes; a longer line is invalid


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


HEADWAY_GROUP = "headway"
"""Name of a pseudo-group; its "collectives" are the runtime's calls that wait for all ranks."""


class Group(NamedTuple):
    """A process group as seen by one rank."""

    name: str
    ranks: tuple[int, ...] | None  # global ranks of the members; None if torch has discarded them
    collectives: tuple[Collective, ...]  # the most recent, oldest first

    @property
    def last_entered(self) -> int:
        """Number of the last collective that the rank entered; 0 if there is none."""
        return max((call.number for call in self.collectives), default=0)

    @property
    def first_pending(self) -> int | None:
        """Number of the first incomplete collective; None if all are complete."""
        return min((call.number for call in self.collectives if not call.is_done), default=None)

    def collective(self, number: int) -> Collective | None:
        found = [call for call in self.collectives if call.number == number]
        return found[-1] if found else None


class ProgressSnapshot(NamedTuple):
    """The position of a rank's training; sent as a sign of progress at most once a second."""

    step: int = 0  # completed optimizer steps
    phase: str = "script"  # phase of the runtime; "script" while user code is running
    total: int = 0  # total steps of the training run; 0: unknown
    loss: float | None = None  # last known loss


class RankReady(NamedTuple):
    """The rank is about to run the script and replies to requests with a `StatusReply`."""


class WillSave(NamedTuple):
    """Whether the rank will save after its current step and exit if it is asked to stop."""

    is_enabled: bool = True


PROJECT, CHECKPOINTS, METRICS, LOGS = "project", "checkpoints", "metrics", "logs"
"""Kinds of `OutputPath`."""


class OutputPath(NamedTuple):
    """The path of the run's project, checkpoints, metrics or logs."""

    what: str  # PROJECT, CHECKPOINTS, METRICS (a file of the jsonl tracker) or LOGS
    path: str


class StepStats(NamedTuple):
    """Timing of one rank's optimizer steps since its previous record."""

    step: int  # number of the last step
    num_steps: int
    seconds: float  # total duration of the steps
    data_s: float  # waiting for the loader
    forward_s: float
    backward_s: float  # without gradient synchronization, if it can be measured separately
    sync_s: float  # waiting for other ranks: gradient synchronization, barriers
    save_s: float
    samples: int  # of this rank; 0: unknown
    rss_bytes: int
    device_bytes: int | None  # allocated device memory; None on a CPU
    total: int  # total steps of the training run; 0: unknown
    loss: float | None  # last known loss
    num_workers: int | None  # workers of the last batch's loader; None: unknown
    stolen_s: float  # part of `seconds` in which no core was available; 0: unknown

    @property
    def has_global_steps(self) -> bool:
        """Whether steps are counted from the start of the training run, not of this process."""
        return bool(self.total or self.data_s or self.forward_s or self.backward_s)

    def empty_at(self, step: int, loss: float | None) -> StepStats:
        """Return a record of zero steps at the given position."""
        none: dict[str, Any] = dict.fromkeys(DURATIONS, 0.0)
        return self._replace(**none, step=step, loss=loss, num_steps=0, samples=0)


DURATIONS = ("seconds", *(name for name in StepStats._fields if name.endswith("_s")))
"""The fields of `StepStats` that are durations."""


class StatusReply(NamedTuple):
    """The rank's current position."""

    groups: tuple[Group, ...]
    progress: ProgressSnapshot
    num_modules: int  # modules imported or being imported
    stacks: tuple[tuple[Frame, ...], ...]  # the main thread's first; most recent call last
    may_be_killed: bool = False  # no work would be lost, as only Headway's handler is set


class CrashSite(NamedTuple):
    """Identifies a crash, so that a repeat of the same crash can be detected."""

    kind: str  # the exception's class
    message: str  # digest; the text may contain secrets
    frame: Frame  # line of the script
    step: int  # completed optimizer steps of the training run


class Crash(NamedTuple):
    """The unhandled exception that terminated a rank's program."""

    time: float  # seconds since the epoch
    kind: str  # the exception's class
    message: str
    traceback: str  # as printed by Python, without the launcher's frames
    is_from_torch: bool = False  # raised in torch's code
    code: int = 1  # the exit code that follows; negative for a signal
    groups: tuple[Group, ...] = ()
    is_from_headway: bool = False  # a bug: raised in Headway's code, but not a HeadwayError
    fix: str = ""  # the HeadwayError's, which `traceback` omits, or of a shadowed module
    where: str = ""  # the HeadwayError's origin, which `traceback` omits
    step: int = 0  # completed steps of the training run; 0: none or unknown
    may_pass: bool = False  # a restart may help; see `reasons.may_pass`

    @property
    def name(self) -> str:
        """The exception's class, for a message."""
        return shown(self.kind[:_MAX_NAME])


class FeatureUse(NamedTuple):
    """Features of the launcher that a rank's program has used."""

    accelerator: bool = False  # created an Accelerator
    group: bool = False  # joined a torch process group
    readers: tuple[str, ...] = ()  # imported modules that read the launcher's variables
    resuming: bool = False  # resumes from a checkpoint if there is one
    stopping: bool = False  # saves and exits on preemption
    notes: tuple[str, ...] = ()  # to repeat after a successful run


class ScriptEnd(NamedTuple):
    """A rank's program has finished. This is not sent if the program calls os._exit."""

    time: float  # seconds since the epoch
    code: int  # the exit code that follows
    message: str = ""  # the text of sys.exit("text")
    exited_at: Frame | None = None  # the sys.exit call; None: end of the script
    groups: tuple[Group, ...] = ()
    feature_use: FeatureUse | None = None


class ServerReady(NamedTuple):
    """The fork server has started."""

    pid: int


class ProcessStart(NamedTuple):
    """The fork server has started a rank."""

    pid: int


class StartFailed(NamedTuple):
    """The fork server could not start a rank."""

    errno: int


class ProcessExit(NamedTuple):
    """A rank's process has exited; sent by the fork server."""

    pid: int
    code: int  # negative for a signal, as in `subprocess`
    time: float  # seconds since the epoch
    leftovers: bool  # all ranks have exited, but a process that they started is still running


Record = (RankReady | WillSave | OutputPath | ProgressSnapshot | StepStats | StatusReply) | (
    Crash | ScriptEnd | ServerReady | ProcessStart | StartFailed | ProcessExit
)


class RecordReader:
    """Parses the data of a status channel into records."""

    def __init__(self) -> None:
        self._lines = Lines(_MAX_LINE)

    def read(self, data: bytes) -> Iterator[Record | ValueError]:
        """Yield the records that `data` completes, and an error for each invalid line."""
        try:
            for line in self._lines.feed(data):
                yield decode_record(line)
        except TooLong as error:
            yield error


def decode_record(line: bytes) -> Record | ValueError:
    """Return a record, or the error of another line, because a script may write to the channel."""
    try:
        record: Record = decode(Record, line)
        return record
    except ValueError as error:
        return error
