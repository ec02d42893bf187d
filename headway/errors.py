"""Headway's exceptions.

    HeadwayError            the base class
    ├── ConfigError         a flag, variable, profile or script name is wrong     exit 2
    ├── MachineError        this machine cannot do what was requested             exit 3
    ├── LaunchError         the ranks could not be started                        exit 4
    │   └── WorkerFailed    a rank failed                                         exit: the rank's
    ├── CheckpointError     a checkpoint is missing, damaged or incompatible      exit 1
    └── UsageError          a script uses the runtime incorrectly                 exit 2
        ├── WrongType       an argument has the wrong type; also a TypeError      exit 2
        └── OutOfMemory     no batch size fits into memory; also a RuntimeError   exit 2

`headway/commands/main.py` prints them once. A traceback from a command is a bug in Headway.
"""

import signal
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:  # TypeVar compiles its bound
    E = TypeVar("E", bound="HeadwayError")


MORE_PROCESSES = "raise `ulimit -u` or the container's pids.max, or use fewer ranks or workers"


class Code(Enum):
    """Identifies a problem in code; never printed."""

    # within one source
    UNKNOWN_SETTING = auto()
    BAD_VALUE = auto()
    DUPLICATE_KEY = auto()
    NO_VALUE = auto()
    BAD_FILE = auto()
    # between settings
    FP16_ON_CPU = auto()
    DEVICES_WITHOUT_CUDA = auto()
    DEVICES_OR_PROCESSES = auto()
    SEVERAL_ON_MPS = auto()
    MACHINE_RANK = auto()
    NO_MAIN_ADDRESS = auto()
    VARIABLE_OF_LAUNCHER = auto()
    VARIABLE_OF_SETTING = auto()
    THREADS_TWICE = auto()
    MISSING_RANK = auto()
    DEBUG_ON_MACHINES = auto()
    NO_CLUSTER = auto()
    CLUSTERS_DISAGREE = auto()
    TASKS = auto()
    NO_SHARD_SIZE = auto()
    SHARD_SIZE = auto()
    OFFLOAD_WITHOUT_GPU = auto()
    # between settings and the machine
    NO_MPS = auto()
    NO_GPU = auto()
    NO_SUCH_GPU = auto()
    NO_USABLE_GPU = auto()
    SEVERAL_MIG_SLICES = auto()
    TOO_FEW_GPUS = auto()
    NO_BF16 = auto()
    # between settings and the program
    SCRIPT_FROM_STREAM = auto()
    LAUNCHER_IN_PROCESS = auto()
    PROGRAM_IN_PROCESS = auto()


class Problem(NamedTuple):
    """One problem that a check found; several can be reported together."""

    what: str  # a sentence with the offending value
    where: str  # the file and line, variable, flag or call that the value came from
    fix: str  # a command or change that solves it
    details: str = ""  # shown between what and where: a traceback
    code: Code | None = None  # identifies the problem to code that handles it
    names: tuple[str, ...] = ()  # settings, first the one to change; env.NAME is a variable
    is_of_machine: bool = False  # the request may work on another machine

    @property
    def without_fix(self) -> str:
        """The problem and its origin."""
        details = "".join(f"\n  {line}".rstrip() for line in self.details.splitlines())
        return f"{self.what}{details}\n  from: {self.where}"

    def __str__(self) -> str:
        return f"{self.without_fix}\n  fix:  {self.fix}"


class HeadwayError(Exception):
    """Base class of all errors: what is wrong, where it came from, and how to fix it.

    Args:
        what: a sentence with the offending value.
        where: the file and line, variable, flag or call that the value came from.
        fix: a command or change that solves it.

    Examples:
        >>> from headway import Accelerator, HeadwayError
        >>> try:
        ...     Accelerator(mixed_precision="int8")
        ... except HeadwayError as error:
        ...     print(type(error).__name__, error.exit_code)
        UsageError 2
    """

    exit_code: int = 1
    note: str = ""  # one more line, after the problems

    def __init__(self, what: str, *, where: str, fix: str, details: str = "") -> None:
        self.problems: tuple[Problem, ...] = (Problem(what, where, fix, details),)
        super().__init__(str(self.problems[0]))

    @classmethod
    def of(cls: "type[E]", problems: Sequence[Problem]) -> "E":
        """Return one error that reports all `problems` (at least one).

        Examples:
            >>> from headway.errors import HeadwayError, Problem
            >>> batch = Problem("batch is -1", where="flag --batch", fix="pass --batch 1")
            >>> workers = Problem("workers is -1", where="flag --workers", fix="pass --workers 1")
            >>> len(HeadwayError.of([batch, workers]).problems)
            2
        """
        error = cls(problems[0].what, where=problems[0].where, fix=problems[0].fix)
        error.problems = tuple(problems)
        error.args = ("\n".join(str(problem) for problem in problems),)
        return error


class ConfigError(HeadwayError):
    """A flag, variable, profile or script name is wrong."""

    exit_code = 2


class MachineError(HeadwayError):
    """This machine cannot do what was requested."""

    exit_code = 3


class LaunchError(HeadwayError, RuntimeError):
    """The ranks could not be started."""

    exit_code = 4


class WorkerFailed(LaunchError):
    """A rank failed; the launcher exits with that rank's exit code."""

    def __init__(
        self, what: str, *, where: str, fix: str, details: str = "", exit_code: int = 1
    ) -> None:
        super().__init__(what, where=where, fix=fix, details=details)
        self.exit_code = exit_code


class CheckpointError(HeadwayError, ValueError, RuntimeError):
    """A checkpoint is missing, damaged or incompatible."""


class UsageError(HeadwayError, ValueError):
    """A script uses the runtime incorrectly."""

    exit_code = 2


class WrongType(UsageError, TypeError):
    """A function was called with an argument of the wrong type."""


class OutOfMemory(UsageError, RuntimeError):
    """Memory ran out with every batch size that was tried."""


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return the closest match of the misspelled `word` among `known`, or None."""
    from difflib import get_close_matches  # imported only for error messages

    matches = get_close_matches(word, list(known), n=1)
    return matches[0] if matches else None
