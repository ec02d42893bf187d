"""The run contract: what the launcher passes to a rank, and how the rank reads it.

It is one JSON value in the variable `HEADWAY_RUN`, next to torch's RANK, WORLD_SIZE, ...; `records`
is the other direction. Without the variable, Accelerate's variables are read.
"""

import json
import os
import time
from collections.abc import Mapping
from typing import NamedTuple

from headway.devices.table import KINDS
from headway.errors import LaunchError, UsageError
from headway.ipc.choices import AUTO, PRECISIONS
from headway.ipc.origin import DEFAULT, Layer, Origin
from headway.ipc.typed import plain, read

VARIABLE = "HEADWAY_RUN"
JOB_VARIABLE = "SLURM_JOB_ID"
ALLOCATION_VARIABLE = "HEADWAY_ALLOCATION"  # a launch's job, and the tasks on each node of it
KEY_VARIABLE = "HEADWAY_RUN_KEY"  # a secret that the machines of one run share
CODE_VARIABLE = "HEADWAY_CODE"  # names the copy of the code that a job runs
RECORD_VARIABLE = "HEADWAY_OWN_RECORD"
"""A process's id, a colon and the folder of the record in which it itself tells how it ends."""
CPUS_VARIABLE = "HEADWAY_CPUS"
"""For the process that starts the ranks: the cores of one rank, as Linux lists them."""
VERSION = 4
NEWEST = LATEST, IF_ANY = "latest", "if-any"
"""What `resume` is where the newest checkpoint is meant, which must be there, or may."""
DEVICES = (*sorted((*KINDS, "gpu")),)
"""Values of `device`, besides auto and kinds of other packages: gpu is that of this machine."""
LOG_LEVELS = ("HEADWAY_LOG_LEVEL", "ACCELERATE_LOG_LEVEL")  # read by get_logger; the first wins
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
"""torch's variables for a process's rank; only the launcher sets them."""

WORLD_OF_ONE = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
    **dict.fromkeys(("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), "1"),
    **dict.fromkeys(("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), "0"),
    "ROLE_NAME": "headway",
    "TORCHELASTIC_RUN_ID": "none",  # as torchrun's
}
"""The variables of the only rank, without its address; no agent has a store for it."""


class RunContract(NamedTuple):
    """The resolved settings of the runtime, each with its origin.

    The script may not contradict one that was passed as a flag.
    """

    device: str  # a name in KINDS; auto under `accelerate launch`
    mixed_precision: str  # a name in PRECISIONS
    gradient_accumulation_steps: int
    origins: Mapping[str, Origin]
    debug_rank: int | None = None  # it may wait at a debugger's prompt, the others for it
    resume: str | None = None  # the checkpoint to go on from: a path, or of NEWEST
    began_at: float = 0.0  # when the job began, in seconds since the epoch; restarts keep it
    time_limit: int | None = None  # seconds from then, after which ranks save and leave
    strategy: str = AUTO  # or a name in STRATEGIES
    shard_size: int | None = None  # ranks that hold one copy of the model, for hsdp
    wrap: str = AUTO  # as `read_wrap` returns it
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    replace_accelerate: bool = False
    library_hooks: bool = True  # training libraries that the script imports are joined

    def deadline(self) -> float | None:
        """Return when the time limit is over, by this process's `time.monotonic()`."""
        if self.time_limit is None:
            return None
        return time.monotonic() + self.began_at + self.time_limit - time.time()


class Ranks(NamedTuple):
    """This process's ranks and world sizes, in torch's terms."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


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
        f"{VARIABLE} is not a run contract that this Headway can read"
        + ("" if version is None else f" (version {version}, expected {VERSION})"),
        where=f"environment {VARIABLE}={text[:60]!r}",
        fix=f"use the same version of Headway in launcher and script, or `unset {VARIABLE}`",
    )


def read_run(environ: Mapping[str, str] = os.environ) -> RunContract | None:
    """Return the contract from Headway's or Accelerate's launcher, if any.

    Headway's launcher also sets Accelerate's variables, to the same values; they are not read.
    Raises LaunchError where `HEADWAY_RUN` cannot be read, and UsageError for a value of a variable
    of Accelerate's that Headway does not support.
    """
    text = environ.get(VARIABLE)
    return _read_accelerate(environ) if text is None else decode(text)


def _read_accelerate(environ: Mapping[str, str]) -> RunContract | None:
    present = {name: variable for name, variable in ACCELERATE.items() if variable in environ}
    if not present:
        return None
    precision = environ.get(ACCELERATE["mixed_precision"], "no").lower()
    if precision not in PRECISIONS:
        raise UsageError(
            f"mixed_precision is {precision!r}, not one of {', '.join(PRECISIONS)}",
            where=f"environment {ACCELERATE['mixed_precision']}",
            fix="choose another --mixed_precision for `accelerate launch`",
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
    """Return the ranks that Headway's launcher or torchrun set; None without a launcher.

    Raises UsageError where a variable is not a number, RANK is missing with a WORLD_SIZE above 1,
    or RANK is not below WORLD_SIZE.
    """
    if "RANK" not in environ and environ.get("WORLD_SIZE", "1") == "1":
        return None
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise UsageError(
            f"RANK is {rank}, but WORLD_SIZE is {world_size}",
            where="the environment of this process",
            fix="start the script with `headway launch` or torchrun, which set both",
        )
    return Ranks(
        rank=rank,
        local_rank=_number(environ, "LOCAL_RANK", rank),
        world_size=world_size,
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", world_size),
    )


def port_of_store(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the port of the launcher's store; None where rank 0 makes a store itself."""
    has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return environ.get("MASTER_PORT") if has_store else None


def is_restart(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher (ours or torchrun) has restarted the ranks."""
    return environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def job_of(environ: Mapping[str, str] = os.environ) -> str:
    """Return the id of the scheduler's job of this process; empty without one."""
    allocated, _, _ = environ.get(ALLOCATION_VARIABLE, "").partition(":")
    return environ.get(JOB_VARIABLE, allocated)


def is_requeued(environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get("SLURM_RESTART_COUNT", "0") != "0"


def read_log_level(environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """Return the variable that sets the level of loggers, and its value; None without one."""
    return next(((name, environ[name]) for name in LOG_LEVELS if environ.get(name)), None)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UsageError(
            f"{name} is {text!r}, which is not a whole number",
            where=f"environment {name}",
            fix="start the script with `headway launch` or torchrun, which set it",
        ) from None
