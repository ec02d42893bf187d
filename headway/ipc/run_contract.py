"""The run contract: the settings that the launcher passes to a rank.

The contract is a JSON value in the variable `HEADWAY_RUN`, next to torch's RANK, WORLD_SIZE, ...
If HEADWAY_RUN is not set, Accelerate's variables are read. Ranks send `records` back.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from headway.devices.table import KINDS
from headway.errors import Code, LaunchError, UsageError
from headway.ipc.choices import AUTO, PRECISIONS
from headway.ipc.origin import DEFAULT, Layer, Origin
from headway.ipc.typed import plain, read

VARIABLE = "HEADWAY_RUN"
JOB_VARIABLE = "SLURM_JOB_ID"
ALLOCATION_VARIABLE = "HEADWAY_ALLOCATION"  # JOB:TASKS, the job of a launch and the tasks per node
KEY_VARIABLE = "HEADWAY_RUN_KEY"  # a secret shared by the machines of a run
CODE_VARIABLE = "HEADWAY_CODE"  # folder of the job's copy of the code
RECORD_VARIABLE = "HEADWAY_OWN_RECORD"
""""PID:FOLDER": the process, and the folder of the record to which the process writes its exit."""
CPUS_VARIABLE = "HEADWAY_CPUS"
"""The cores of one rank, in Linux's list format; read by the process that starts the ranks."""
FLIGHT_RECORDER = "TORCH_FR_BUFFER_SIZE", "2000"  # off by default in torch 2.8 to 2.10
VERSION = 5
NEWEST = LATEST, IF_ANY = "latest", "if-any"
"""Values of `resume` for the newest checkpoint: `latest` requires one, `if-any` does not."""
DEVICES = (*sorted((*KINDS, "gpu")),)
"""Values of `device`, besides `auto` and other packages' devices; `gpu` means cuda, xpu or mps."""
LOG_LEVELS = ("HEADWAY_LOG_LEVEL", "ACCELERATE_LOG_LEVEL")  # for get_logger; the first wins
YES = ("1", "true", "t", "yes", "y", "on")  # as in Accelerate
ACCELERATE = {  # the variables of `accelerate launch`
    "device": "ACCELERATE_USE_CPU",
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
}

RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
)
"""torch's variables for a process's rank, set only by the launcher."""

_monotonic = time.monotonic  # a script may replace it
_EPOCH_S = time.time() - _monotonic()


def epoch_time() -> float:
    """Return the seconds since 1970, without the clock's changes since this module was imported."""
    return _EPOCH_S + _monotonic()


class RunContract(NamedTuple):
    """The resolved settings of the runtime, each with its origin.

    The script must not contradict a setting that was passed as a flag.
    """

    device: str  # a name in KINDS; auto under `accelerate launch`
    mixed_precision: str  # a name in PRECISIONS
    gradient_accumulation_steps: int
    origins: Mapping[str, Origin]
    debug_rank: int | None = None  # the rank that may pause in a debugger while the others wait
    resume: str | None = None  # the checkpoint to resume from: a path or a value of NEWEST
    began_at: float = 0.0  # the job's start in seconds since the epoch, unchanged by restarts
    time_limit: int | None = None  # seconds from `began_at`, after which ranks save and exit
    strategy: str = AUTO  # or a name in STRATEGIES
    shard_size: int | None = None  # ranks per copy of the model, for hsdp
    wrap: str = AUTO  # in the form that `read_wrap` returns
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    replace_accelerate: bool = False
    library_hooks: bool = True  # hook into training libraries that the script imports

    def deadline(self) -> float | None:
        """Return the value of this process's `time.monotonic()` at which the time limit expires."""
        if self.time_limit is None:
            return None
        return time.monotonic() + self.began_at + self.time_limit - epoch_time()


class Ranks(NamedTuple):
    """Ranks and world sizes of this process, as in torch."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


def rank_variables(ranks: Ranks, machine: int = 0, num_machines: int = 1) -> dict[str, str]:
    """Return torch's variables for a rank of a run without restarts, except those of its store."""
    values = {
        **dict.fromkeys(("RANK", "ROLE_RANK"), ranks.rank),
        **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), ranks.world_size),
        "LOCAL_RANK": ranks.local_rank,
        "LOCAL_WORLD_SIZE": ranks.local_world_size,
        "GROUP_RANK": machine,
        "GROUP_WORLD_SIZE": num_machines,
        **dict.fromkeys(("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), 0),
    }
    names = {"ROLE_NAME": "headway", "TORCHELASTIC_RUN_ID": "none"}  # as torchrun does
    return {name: str(value) for name, value in values.items()} | names


def encode(run: RunContract) -> str:
    return json.dumps({"version": VERSION, **plain(run)}, separators=(",", ":"))


def decode(text: str) -> RunContract:
    try:
        fields = json.loads(text)
        version = fields.pop("version")
        if version == VERSION:
            return read(RunContract, fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        version = None
    raise LaunchError(
        f"{VARIABLE} is not a run contract of this Headway version"
        + ("" if version is None else f" (version {version}, expected {VERSION})"),
        where=f"environment {VARIABLE}={text[:60]!r}",
        fix=f"use one version of Headway in the launcher and the script, or `unset {VARIABLE}`",
        code=Code.OTHER_VERSION,
    )


def read_run(environ: Mapping[str, str] = os.environ) -> RunContract | None:
    """Return the contract from Headway's or Accelerate's launcher; None without a launcher.

    Headway's launcher also sets Accelerate's variables to the same values, but they are not read.
    Raises LaunchError for an invalid `HEADWAY_RUN` and UsageError for an unsupported value of an
    Accelerate variable.
    """
    text = environ.get(VARIABLE)
    return _read_accelerate(environ) if text is None else decode(text)


def has_unread_variables(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether there are HEADWAY_* variables, and no launcher that has read them."""
    return VARIABLE not in environ and any(name.startswith("HEADWAY_") for name in environ)


def _read_accelerate(environ: Mapping[str, str]) -> RunContract | None:
    present = {name: variable for name, variable in ACCELERATE.items() if variable in environ}
    if not present:
        return None
    precision = environ.get(ACCELERATE["mixed_precision"], "no").lower()
    if precision not in PRECISIONS:
        raise UsageError(
            f"invalid value {precision!r} for mixed_precision: must be one of "
            + ", ".join(PRECISIONS),
            where=f"environment {ACCELERATE['mixed_precision']}",
            fix="choose another --mixed_precision for `accelerate launch`",
            code=Code.BAD_VALUE,
        )
    return RunContract(
        device="cpu" if environ.get(ACCELERATE["device"], "").lower() in YES else "auto",
        mixed_precision=precision,
        gradient_accumulation_steps=_number(environ, ACCELERATE["gradient_accumulation_steps"], 1),
        origins={
            name: Origin(Layer.ENVIRONMENT, variable=present[name]) if name in present else DEFAULT
            for name in ACCELERATE
        },
    )


def read_ranks(environ: Mapping[str, str] = os.environ) -> Ranks | None:
    """Return the ranks set by Headway's launcher or torchrun; None without a launcher.

    Without LOCAL_RANK, ranks are numbered machine by machine, with LOCAL_WORLD_SIZE ranks on each;
    without both, all ranks are on this machine. Raises UsageError if a variable is not a number, if
    RANK is missing and WORLD_SIZE exceeds 1, or if RANK is not below WORLD_SIZE.
    """
    if "RANK" not in environ and environ.get("WORLD_SIZE", "1") == "1":
        return None
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in environ:
            raise UsageError(
                f"{other} is {environ[other]}, but {name} is not set",
                where=f"environment {other}={environ[other]}",
                fix=f"`unset {other}`, or set {name} too, which `headway launch "
                "--num-processes N` does for each process",
                code=Code.RANK_VARIABLES,
            )
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise UsageError(
            f"RANK is {rank}, but WORLD_SIZE is {world_size}",
            where="the environment of this process",
            fix="start the script with `headway launch` or torchrun, which set both",
            code=Code.RANK_VARIABLES,
        )
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", world_size)
    local_rank = _number(environ, "LOCAL_RANK", rank % max(local_world_size, 1))
    return Ranks(rank, local_rank, world_size, local_world_size)


def main_place() -> str:
    """Return rank 0's address and port, as ADDRESS:PORT."""
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def values_of(names: Iterable[str]) -> list[str]:
    """Return the name and value of each of these variables that is set."""
    return [f"{name} (now {os.environ[name]!r})" for name in names if name in os.environ]


def record_collectives() -> None:
    """Enable torch's flight recorder, which `call_barrier` reads, for the groups created later."""
    os.environ.setdefault(*FLIGHT_RECORDER)


def port_of_store() -> str | None:
    """Return the port of the launcher's store; None if rank 0 creates the store."""
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ.get("MASTER_PORT") if has_store else None


def is_restart() -> bool:
    """Return whether Headway or torchrun has restarted the ranks."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def job_of() -> str:
    """Return this process's scheduler job id; empty outside a job."""
    allocated, _, _ = os.environ.get(ALLOCATION_VARIABLE, "").partition(":")
    return os.environ.get(JOB_VARIABLE, allocated)


def is_requeued() -> bool:
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def read_log_level() -> tuple[str, str] | None:
    """Return the name and value of the variable that sets the log level; None if unset."""
    return next(((name, os.environ[name]) for name in LOG_LEVELS if os.environ.get(name)), None)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UsageError(
            f"invalid value {text!r} for {name}: not a whole number",
            where=f"environment {name}",
            fix="start the script with `headway launch` or torchrun, which set it",
            code=Code.RANK_VARIABLES,
        ) from None
