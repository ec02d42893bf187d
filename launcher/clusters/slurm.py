"""What SLURM's variables say: the place of this process in its step, or the job that it is in.

Source: `man srun` and `man sbatch`, output environment variables; slurm.h for the step ids.
"""

from __future__ import annotations

from typing import NamedTuple

from headway.contract.run import ALLOCATION_VARIABLE, JOB_VARIABLE, Ranks
from headway.launcher.clusters.nodelist import read_nodelist, read_repeated
from headway.launcher.clusters.row import Cluster, Environ, faulty, port_from, said_by
from headway.settings.profile import Entries, Entry

_JOB_NODES = "SLURM_JOB_NODELIST"
_STEP = "SLURM_STEP_ID"
_TERMINAL = "SLURM_PTY_PORT"
_STEP_NODES = "SLURM_STEP_NODELIST"
_STEP_TASKS = "SLURM_STEP_TASKS_PER_NODE"
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # SLURM_MAX_NORMAL_STEP_ID: then batch scripts and shells


class Allocation(NamedTuple):
    """The machines of a job, or of the step of an interactive shell in it.

    Args:
        groups: the names of the machines, for each component of a heterogeneous job.
        cpus: the CPUs of the job on each machine, in the same order.
        is_here: this process is on one of the machines.
        shell_nodes: the list of machines of the step that this shell is a task of; else empty.
    """

    groups: tuple[tuple[str, ...], ...]
    cpus: tuple[tuple[int, ...], ...]
    is_here: bool
    shell_nodes: str = ""

    @property
    def num_machines(self) -> int:
        """How many machines there are."""
        return sum(map(len, self.groups))


def is_step(environ: Environ) -> bool:
    """Return whether srun has started this process as one of a step's tasks.

    Of a step in a pseudo-terminal, only one task has it: that is a shell to start others from.
    """
    return _is_numbered(environ) and _TERMINAL not in environ


def allocation_of(environ: Environ) -> Allocation:
    """Return the machines that a process which is no task of a step may use.

    Raises:
        ValueError: SLURM's variables have values that cannot be read.
        KeyError: one of them is missing.
    """
    size = int(environ.get("SLURM_HET_SIZE", "1"))
    ends = [f"_HET_GROUP_{number}" for number in range(size)] if size > 1 else [""]
    lists = [environ[_JOB_NODES + end] for end in ends]
    if _is_numbered(environ):
        lists, ends = [environ[_STEP_NODES]], [""]
    return Allocation(
        groups=tuple(tuple(read_nodelist(nodes)) for nodes in lists),
        cpus=tuple(tuple(read_repeated(environ[f"SLURM_JOB_CPUS_PER_NODE{end}"])) for end in ends),
        is_here="SLURMD_NODENAME" in environ,
        shell_nodes=lists[0] if _is_numbered(environ) else "",
    )


def _is_numbered(environ: Environ) -> bool:
    """Return whether this process is in a step that srun has made, not in a script's or shell's."""
    step = environ.get(_STEP, "")
    return step.isdecimal() and step.isascii() and int(step) < _FIRST_SPECIAL_STEP


def _derive(environ: Environ) -> Entries:
    try:
        return _of_step(environ) if is_step(environ) else _of_job(environ)
    except (ValueError, KeyError, IndexError) as error:
        reason = f"{error.args[0]} is not set" if isinstance(error, KeyError) else error
        what = f"SLURM's variables cannot be read: {reason}"
        fix = "pass --num-machines, --machine-rank and --main-address, or --cluster none"
        return {"num_machines": faulty("num_machines", "1", JOB_VARIABLE, what, fix)}


def _of_job(environ: Environ) -> Entries:
    """Return what is known before a step is made: one has to be, unless one machine is enough."""
    allocation = allocation_of(environ)
    entries = {"num_machines": Entry(str(allocation.num_machines), said_by(_JOB_NODES))}
    if allocation.num_machines > 1:
        entries["main_address"] = Entry(allocation.groups[0][0], said_by(_JOB_NODES))
    return {**entries, **_processes(tasks_asked_for(environ), 0)}


def tasks_asked_for(environ: Environ) -> str:
    """Return how many tasks a job asks for on each machine, as SLURM writes it.

    Empty if it asks for none, where SLURM may give as many as there are CPUs, and if it is a
    heterogeneous job, which has such a number for each of its components.
    """
    is_asked = "SLURM_NTASKS" in environ and "SLURM_HET_SIZE" not in environ
    return environ.get("SLURM_TASKS_PER_NODE", "") if is_asked else ""


def _of_step(environ: Environ) -> Entries:
    step = f"{environ[JOB_VARIABLE]}.{environ[_STEP]}"
    entries = {
        "num_machines": Entry(environ["SLURM_STEP_NUM_NODES"], said_by("SLURM_STEP_NUM_NODES")),
        "machine_rank": Entry(environ["SLURM_NODEID"], said_by("SLURM_NODEID")),
        "main_address": Entry(_first_node(environ), said_by(_STEP_NODES)),
        "main_port": Entry(port_from(step), said_by(_STEP, "a port from those of job and step")),
    }
    task = _task(environ)
    if task is not None:
        count = Entry(str(task.local_world_size), said_by(_STEP_TASKS))
        return {**entries, "num_processes": count}
    job, _, tasks = environ.get(ALLOCATION_VARIABLE, "").partition(":")
    asked = _processes(tasks, _index(environ)) if job == environ[JOB_VARIABLE] else {}
    only_one = ("main_address", "main_port") if environ["SLURM_STEP_NUM_NODES"] == "1" else ()
    return {name: one for name, one in {**entries, **asked}.items() if name not in only_one}


def _processes(tasks_per_node: str, index: int) -> Entries:
    """Return how many processes to start on a machine where somebody has asked for several tasks.

    One for each machine says nothing: it is what a job has that asks for no number.
    """
    counts = read_repeated(tasks_per_node) if tasks_per_node else []
    if not any(count > 1 for count in counts):
        return {}
    return {"num_processes": Entry(str(counts[index]), said_by("SLURM_TASKS_PER_NODE"))}


def _first_node(environ: Environ) -> str:
    """Return the node with SLURM_NODEID 0.

    The step's list is sorted, but the nodes are counted in the order of a job's components.
    """
    nodes = read_nodelist(environ[_STEP_NODES])
    for group in range(int(environ.get("SLURM_HET_SIZE", "0"))):
        for node in read_nodelist(environ[f"{_JOB_NODES}_HET_GROUP_{group}"]):
            if node in nodes:
                return node
    return nodes[0]


def _task(environ: Environ) -> Ranks | None:
    """Return the place of this task where a machine has several of them, so that each is a rank."""
    if not is_step(environ):
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
    """Return the place of this machine in the step's lists, which SLURM_NODEID need not be."""
    return read_nodelist(environ[_STEP_NODES]).index(environ["SLURMD_NODENAME"])


def _is_here(environ: Environ) -> bool:
    return JOB_VARIABLE in environ and _JOB_NODES in environ


SLURM = Cluster("slurm", _is_here, {}, _derive, _task)
