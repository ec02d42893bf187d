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

`headway/commands/main.py` prints each error once. A traceback from a command is a bug in Headway.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:  # TypeVar compiles its bound
    E = TypeVar("E", bound="HeadwayError")


SOCKET_FIX = "unset GLOO_SOCKET_IFNAME, or set it to a name that `ip -brief address` prints"
MORE_PROCESSES = "raise `ulimit -u` or the container's pids.max, or use fewer ranks or workers"


class Code:
    """The ids of all error causes, explained in errors.md. An id is never changed or reused."""

    UNKNOWN_SETTING = "HW001"
    BAD_VALUE = "HW002"
    DUPLICATE_KEY = "HW003"
    NO_VALUE = "HW004"
    BAD_FILE = "HW005"
    COMMAND_LINE = "HW006"
    FLAGS_CONTRADICT = "HW007"
    NO_PROGRAM = "HW008"
    UNREADABLE = "HW009"
    UNWRITABLE = "HW010"
    NOT_TRUSTED = "HW011"
    EDIT_BY_HAND = "HW012"
    FP16_ON_CPU = "HW101"
    DEVICES_WITHOUT_CUDA = "HW102"
    DEVICES_OR_PROCESSES = "HW103"
    SEVERAL_ON_MPS = "HW104"
    MACHINE_RANK = "HW105"
    NO_MAIN_ADDRESS = "HW106"
    VARIABLE_OF_LAUNCHER = "HW107"
    VARIABLE_OF_SETTING = "HW108"
    THREADS_TWICE = "HW109"
    MISSING_RANK = "HW110"
    DEBUG_ON_MACHINES = "HW111"
    NO_CLUSTER = "HW112"
    CLUSTERS_DISAGREE = "HW113"
    TASKS = "HW114"
    NO_SHARD_SIZE = "HW115"
    SHARD_SIZE = "HW116"
    OFFLOAD_WITHOUT_GPU = "HW117"
    SCRIPT_FROM_STREAM = "HW118"
    LAUNCHER_IN_PROCESS = "HW119"
    PROGRAM_IN_PROCESS = "HW120"
    NO_MPS = "HW201"
    NO_GPU = "HW202"
    NO_SUCH_GPU = "HW203"
    NO_USABLE_GPU = "HW204"
    SEVERAL_MIG_SLICES = "HW205"
    TOO_FEW_GPUS = "HW206"
    NO_BF16 = "HW207"
    UNSUPPORTED_HERE = "HW208"
    NOT_INSTALLED = "HW209"
    CANNOT_START = "HW301"
    RANK_VARIABLES = "HW302"
    OTHER_VERSION = "HW303"
    NO_CONNECTION = "HW304"
    REFUSED = "HW305"
    KEY = "HW306"
    PORT = "HW307"
    SSH = "HW308"
    SLURM_STEP = "HW309"
    JOB = "HW310"
    NO_RUN = "HW311"
    NO_LAUNCH = "HW312"
    NO_ESTIMATE = "HW313"
    NO_CHECKPOINT = "HW401"
    DAMAGED = "HW402"
    MISMATCH = "HW403"
    NOT_SHARED = "HW404"
    CHECKPOINT_EXISTS = "HW405"
    UNSAVABLE = "HW406"
    PICKLED = "HW407"
    PARTLY_RESTORED = "HW408"
    NO_FOLDER = "HW409"
    BAD_ARGUMENT = "HW501"
    WRONG_TYPE = "HW502"
    CONTRADICTION = "HW503"
    CONTRADICTS_RUN = "HW504"
    UNSUPPORTED = "HW505"
    CALLS_DIFFER = "HW506"
    TENSORS_DIFFER = "HW507"
    MODELS_DIFFER = "HW508"
    NOT_PREPARED = "HW509"
    CHANGED_LATE = "HW510"
    NO_GROUP = "HW511"
    TWO_RUNTIMES = "HW512"
    NOTEBOOK = "HW513"
    OUT_OF_MEMORY = "HW514"
    LOSS = "HW515"
    ACCUMULATION = "HW516"
    SHARDING = "HW517"
    MODEL_DEVICE = "HW518"
    TRACKER = "HW519"
    NO_COUNTERPART = "HW520"
    BATCH_SIZE = "HW601"
    SHARDED_TWICE = "HW602"
    DATA_DIFFERS = "HW603"
    METRICS = "HW604"
    UNSHARDABLE = "HW605"


class Problem(NamedTuple):
    """One problem that a check found; several can be reported together."""

    what: str  # a sentence with the offending value
    where: str  # the file and line, variable, flag or call that the value came from
    fix: str  # a command or change that solves the problem
    code: str | None  # one of `Code`; None for the failure of a script
    details: str = ""  # such as a traceback; shown between what and where
    names: tuple[str, ...] = ()  # settings: the first should be changed; env.NAME is a variable
    is_of_machine: bool = False  # the request may work on another machine

    @property
    def title(self) -> str:
        """The first line, with the problem and its id."""
        return f"{self.what} [{self.code}]" if self.code else self.what

    @property
    def statement(self) -> str:
        """The problem, without its origin and fix."""
        details = "".join(f"\n  {line}".rstrip() for line in self.details.splitlines())
        return f"{self.title}{details}"

    def __str__(self) -> str:
        fix = f"\n  fix:  {self.fix}" if self.fix else ""
        return f"{self.statement}\n  from: {self.where}{fix}"


class HeadwayError(Exception):
    """Base class of all errors, which state what is wrong, where it came from and how to fix it.

    Args:
        what: a sentence with the offending value.
        where: the file and line, variable, flag or call that the value came from.
        fix: a command or change that solves the problem.
        code: the id of the cause, which `headway explain` describes, or None.

    Examples:
        >>> from headway import Accelerator, HeadwayError
        >>> try:
        ...     Accelerator(mixed_precision="int8")
        ... except HeadwayError as error:
        ...     print(type(error).__name__, error.exit_code)
        UsageError 2
    """

    exit_code: int = 1
    note: str = ""  # an additional line, printed after the problems

    def __init__(
        self,
        what: str,
        *,
        where: str,
        fix: str,
        code: str | None,
        details: str = "",
        is_of_all_ranks: bool = False,
    ) -> None:
        self.is_of_all_ranks = is_of_all_ranks  # if so, only rank 0 prints all of it
        self.problems: tuple[Problem, ...] = (Problem(what, where, fix, code, details),)
        super().__init__(str(self.problems[0]))

    @classmethod
    def of(cls: "type[E]", problems: Sequence[Problem]) -> "E":
        """Return one error that reports all `problems` (at least one).

        Examples:
            >>> from headway.errors import Code, HeadwayError, Problem
            >>> batch = Problem("batch is -1", "flag --batch", "pass --batch 1", Code.BAD_VALUE)
            >>> two = HeadwayError.of([batch, batch._replace(what="batch is 0.5")])
            >>> str(two).splitlines()[0]
            'batch is -1 [HW002]'
        """
        first = problems[0]
        error = cls(first.what, where=first.where, fix=first.fix, code=first.code)
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
        super().__init__(what, where=where, fix=fix, code=None, details=details)
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


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is closest to `word`; None if no known word is similar."""
    from difflib import get_close_matches  # imported only for error messages

    matches = get_close_matches(word, list(known), n=1)
    return matches[0] if matches else None


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return the clause that suggests the known word closest to `word`, or an empty string."""
    close = did_you_mean(word, known)
    return f"; did you mean {close!r}?" if close else ""
