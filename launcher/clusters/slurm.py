"""Reads SLURM's variables and node lists, and runs launches as steps of a SLURM job."""

from __future__ import annotations

import os
import re
import secrets
import shlex
from collections.abc import Iterator, Sequence
from itertools import islice, product
from math import prod
from shutil import which
from typing import NamedTuple, NoReturn

from headway.errors import Code, ConfigError, LaunchError
from headway.ipc.numbering import NUMBERINGS, STEP_VARIABLE, Environ, is_numbered_step, is_task
from headway.ipc.run_contract import ALLOCATION_VARIABLE, JOB_VARIABLE, KEY_VARIABLE, Ranks
from headway.ipc.stderr import flush_streams
from headway.launcher.clusters.kinds import ClusterKind, invalid, origin_of, port_from, unreadable
from headway.settings.profile import Entries, Entry
from headway.settings.table import Settings

_MAX_NODES = 1_000_000  # more than any cluster has
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_REPEATED = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def read_nodelist(text: str) -> list[str]:
    """Return the nodes in a SLURM node list, in order; raises ValueError if it is malformed.

    >>> read_nodelist("rack[1-2]n[03-04],login")
    ['rack1n03', 'rack1n04', 'rack2n03', 'rack2n04', 'login']
    """
    nodes: list[str] = []
    for pattern in re.split(r",(?![^[]*\])", text):  # at commas outside brackets
        parts = re.split(r"\[([^][]*)\]", pattern)  # literal parts, and ranges between them
        if not pattern or any(char in part for part in parts for char in "[]"):
            raise ValueError(f"{text!r} is not a node list")
        ranges = {odd: islice(_numbers(parts[odd]), _MAX_NODES) for odd in range(1, len(parts), 2)}
        choices = [[*ranges.get(index, (part,))] for index, part in enumerate(parts)]
        if len(nodes) + prod(map(len, choices)) >= _MAX_NODES:
            raise ValueError(f"{text[:60]!r} has more than {_MAX_NODES} nodes")
        nodes += map("".join, product(*choices))
    return nodes


def read_repeated(text: str) -> list[int]:
    """Expand SLURM's notation for one number per node; raises ValueError if it is malformed.

    >>> read_repeated("2(x3),1")
    [2, 2, 2, 1]
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part)
        if match is None or len(numbers) + int(match[2] or 1) > _MAX_NODES:
            raise ValueError(f"{text[:60]!r} is not a list of one number per node")
        numbers += [int(match[1])] * int(match[2] or 1)
    return numbers


def _numbers(ranges: str) -> Iterator[str]:
    """Yield all numbers in the ranges, zero-padded as in the text: 03, 04 and 7 for 03-04,7."""
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not 0 <= int(last) - int(first) < _MAX_NODES:
            raise ValueError(f"{ranges[:60]!r} is not a list of numbers or ranges")
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}}"


_JOB_NODES = "SLURM_JOB_NODELIST"
_COMPONENTS = "SLURM_HET_SIZE"
_STEP_NODES = "SLURM_STEP_NODELIST"
_STEP_TASKS = "SLURM_STEP_TASKS_PER_NODE"
_CPUS = "SLURM_JOB_CPUS_PER_NODE"


class Allocation(NamedTuple):
    """The machines of a job, or of an interactive shell's step."""

    nodes: tuple[str, ...]
    is_here: bool  # whether this process runs on one of the machines
    shell_nodes: str = ""  # node list of the interactive shell's step, if any


def allocation_of(environ: Environ) -> Allocation:
    """Return the machines available to a process that is not a task of a step.

    Raises ValueError if a variable is malformed, and KeyError if it is missing.
    """
    is_shell = is_numbered_step(environ)
    nodes = environ[_STEP_NODES if is_shell else _JOB_NODES]
    return Allocation(
        nodes=tuple(read_nodelist(nodes)),
        is_here="SLURMD_NODENAME" in environ,
        shell_nodes=nodes if is_shell else "",
    )


def _derive(environ: Environ) -> Entries:
    if environ.get(_COMPONENTS, "1") != "1":
        what = "heterogeneous SLURM jobs are not supported"
        return invalid(_COMPONENTS, what, "submit a job with one component, or pass --cluster none")
    try:
        return _step_settings(environ) if is_task(environ) else _job_settings(environ)
    except (ValueError, KeyError, IndexError) as error:
        has_one_node = not set(environ[_JOB_NODES]) & {*"[],"}
        is_alone = has_one_node and NUMBERINGS["slurm"].count(environ) <= 1
        if isinstance(error, KeyError) and is_alone:  # a container may hide the other variables
            return {"num_machines": Entry("1", origin_of(_JOB_NODES))}
        return unreadable(JOB_VARIABLE, "SLURM's variables cannot be read", error)


def _job_settings(environ: Environ) -> Entries:
    """Return the settings for a process that runs in a job, but not in one of the job's steps."""
    allocation = allocation_of(environ)
    entries = {"num_machines": Entry(str(len(allocation.nodes)), origin_of(_JOB_NODES))}
    if len(allocation.nodes) > 1:
        entries["main_address"] = Entry(allocation.nodes[0], origin_of(_JOB_NODES))
    return {**entries, **_processes(requested_tasks(environ), 0)}


def requested_tasks(environ: Environ) -> str:
    """Return the job's requested tasks per node in SLURM's notation, or an empty string."""
    return environ.get("SLURM_TASKS_PER_NODE", "") if "SLURM_NTASKS" in environ else ""


def _step_settings(environ: Environ) -> Entries:
    step = f"{environ[JOB_VARIABLE]}.{environ[STEP_VARIABLE]}"
    entries = {
        "num_machines": Entry(environ["SLURM_STEP_NUM_NODES"], origin_of("SLURM_STEP_NUM_NODES")),
        "machine_rank": Entry(environ["SLURM_NODEID"], origin_of("SLURM_NODEID")),
        "main_address": Entry(read_nodelist(environ[_STEP_NODES])[0], origin_of(_STEP_NODES)),
        "main_port": Entry(port_from(step), origin_of(STEP_VARIABLE, "port derived from the step")),
    }
    task = _task(environ)
    if task is not None:
        count = Entry(str(task.local_world_size), origin_of(_STEP_TASKS))
        return {**entries, "num_processes": count}
    job, _, tasks = environ.get(ALLOCATION_VARIABLE, "").partition(":")
    requested = _processes(tasks, _index(environ)) if job == environ[JOB_VARIABLE] else {}
    only_one = ("main_address", "main_port") if environ["SLURM_STEP_NUM_NODES"] == "1" else ()
    return {name: entry for name, entry in {**entries, **requested}.items() if name not in only_one}


def _processes(tasks_per_node: str, index: int) -> Entries:
    """Return num_processes; empty if the job has one task per node, which is SLURM's default."""
    counts = read_repeated(tasks_per_node) if tasks_per_node else []
    if not any(count > 1 for count in counts):
        return {}
    return {"num_processes": Entry(str(counts[index]), origin_of("SLURM_TASKS_PER_NODE"))}


def _task(environ: Environ) -> Ranks | None:
    if not is_task(environ):
        return None
    tasks = read_repeated(environ[_STEP_TASKS])
    if max(tasks) == 1:
        return None
    return Ranks(
        rank=int(environ["SLURM_PROCID"]),
        local_rank=int(environ["SLURM_LOCALID"]),
        world_size=sum(tasks),
        local_world_size=tasks[_index(environ)],
    )


def _index(environ: Environ) -> int:
    """Return this machine's index in the step's lists, which may differ from SLURM_NODEID."""
    return read_nodelist(environ[_STEP_NODES]).index(environ["SLURMD_NODENAME"])


SLURM = ClusterKind(
    "slurm",
    lambda environ: JOB_VARIABLE in environ and _JOB_NODES in environ,
    {},
    _derive,
    _task,
    job_variable=JOB_VARIABLE,
)


_STEP_OPTIONS = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK"),
    *("SLURM_GPUS_PER_TASK", "SLURM_DISTRIBUTION", "SLURM_PTY_", "SLURM_CPU_BIND"),
)
"""Prefixes of the variables that srun would interpret as options of the step."""


class Step(NamedTuple):
    command: tuple[str, ...]
    environment: dict[str, str]
    job: str
    num_machines: int


def step_of(
    environ: Environ, settings: Settings, launch: Sequence[str], *, has_terminal: bool
) -> Step | None:
    """Return the step that should run the command `launch`; None if this process should run it.

    A launch on one machine also runs in a step, unless it has a terminal. Before the time limit and
    on preemption, SLURM sends signals to steps, but not to the batch script. If the user sets the
    machine rank or the main address, no step is used: the user starts the launch on each machine.

    Raises ConfigError if the job has fewer machines than requested, and LaunchError if this process
    is in a step whose variables are missing.
    """
    is_manual = any(settings.are_user_set(name) for name in ("machine_rank", "main_address"))
    if settings.cluster != SLURM.name or is_task(environ) or is_manual:
        return None
    allocation = allocation_of(environ)
    machines = settings.num_machines
    is_single_machine = settings.are_user_set("num_machines") and machines == 1
    has_srun = _CPUS in environ and which("srun", path=environ.get("PATH")) is not None
    is_enough = has_terminal or not has_srun
    if is_single_machine or (machines == 1 and allocation.is_here and is_enough):
        return None
    job = environ[JOB_VARIABLE]
    if KEY_VARIABLE in environ and environ.get(ALLOCATION_VARIABLE, "").startswith(f"{job}:"):
        raise LaunchError(
            "srun started this launch, but the variables of its step are missing",
            where=f"{ALLOCATION_VARIABLE}={environ[ALLOCATION_VARIABLE]}, without SLURM_STEP_ID",
            fix="do not unset SLURM's variables in the job, or pass --cluster none",
            code=Code.SLURM_STEP,
        )
    _check_num_machines(allocation, settings)
    words = [*launch] if ":" not in launch else ["sh", "-c", f"exec {shlex.join(launch)}"]
    return Step(
        command=(*_srun_command(allocation, machines, _min_cpus(environ)), *words),
        environment=_environment(environ),
        job=job,
        num_machines=machines,
    )


def run_step(step: Step) -> NoReturn:
    """Replace this process with srun, which returns the highest exit code of its tasks."""
    flush_streams()
    try:
        os.execvpe(step.command[0], step.command, step.environment)
    except OSError as error:
        raise LaunchError(
            f"cannot run srun to start the launch on {step.num_machines} machines of this job: "
            f"{error.strerror}",
            where=f"{JOB_VARIABLE}={step.job}",
            fix="start the launch with srun outside the container, with --ntasks-per-node=1, or "
            "pass --num-machines 1 to run on this machine alone",
            code=Code.SLURM_STEP,
        ) from None


def _check_num_machines(allocation: Allocation, settings: Settings) -> None:
    available, requested = len(allocation.nodes), settings.num_machines
    if requested > available:
        raise ConfigError(
            f"num_machines is {requested}, but this job has {available} machine"
            + "s" * (available > 1),
            where=settings.where("num_machines"),
            fix="remove num_machines: it defaults to the number of machines in the job",
            code=Code.SLURM_STEP,
        )


def _min_cpus(environ: Environ) -> int:
    """Return the smallest number of CPUs that the job has on any of its machines."""
    try:
        return min(read_repeated(environ[_CPUS]))
    except (KeyError, ValueError):
        raise ConfigError(
            f"{_CPUS} is {environ.get(_CPUS, '')!r}, but srun needs the number of CPUs per machine",
            where=f"environment {_CPUS}",
            fix="keep SLURM's variables in the environment, or pass --num-machines 1 to run on "
            "this machine alone",
            code=Code.SLURM_STEP,
        ) from None


def _srun_command(allocation: Allocation, machines: int, cpus: int) -> list[str]:
    """Return the srun command that starts one task with `cpus` CPUs on each machine.

    The launchers stop each other, so srun must not kill launchers whose ranks are still saving.
    The step shares its CPUs and GPUs with other steps, such as that of an interactive shell.
    """
    words = ["srun", "--export=ALL", "--overlap", "--kill-on-bad-exit=0", "--wait=0", "--input=0"]
    words += ["--disable-status", "--ntasks-per-node=1", f"--cpus-per-task={cpus}"]
    words += [f"--nodes={machines}", f"--ntasks={machines}"]
    if allocation.shell_nodes:
        words.append(f"--nodelist={allocation.shell_nodes}")
    return words


def _environment(environ: Environ) -> dict[str, str]:
    """Return the step's environment, including a key that only the step's launchers share."""
    inherited = {name: text for name, text in environ.items() if not name.startswith(_STEP_OPTIONS)}
    return {
        KEY_VARIABLE: secrets.token_hex(32),
        **inherited,
        ALLOCATION_VARIABLE: f"{environ[JOB_VARIABLE]}:{requested_tasks(environ)}",
    }
