"""What SLURM's variables say: the place of this process in its step, or the job that it is in.

Source: `man srun` and `man sbatch`, output environment variables; slurm.h for the step ids.
"""

from __future__ import annotations

from typing import NamedTuple

from headway.contract.run import ALLOCATION_VARIABLE
from headway.launcher.clusters.nodelist import read_nodelist, read_repeated
from headway.launcher.clusters.row import Cluster, Environ, Task, faulty, said_by
from headway.settings.profile import Entries, Entry

JOB = "SLURM_JOB_ID"
_JOB_NODES = "SLURM_JOB_NODELIST"
_STEP = "SLURM_STEP_ID"
_STEP_NODES = "SLURM_STEP_NODELIST"
_STEP_TASKS = "SLURM_STEP_TASKS_PER_NODE"
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # SLURM_MAX_NORMAL_STEP_ID: then batch scripts and shells
_FIRST_PORT, _NUM_PORTS = 20000, 12000  # below those that the system gives out


class Allocation(NamedTuple):
    """The machines of a job, or of the step of an interactive shell in it.

    Args:
        groups: the names of the machines, for each component of a heterogeneous job.
        cpus: the CPUs of the job on each machine, in the same order.
        is_here: this process is on one of the machines.
        shell_nodes: the list of machines of the step that this shell is; empty where it is none.
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

    A shell in a pseudo-terminal is the only one that reads it, so it is not one task of several.
    """
    step = environ.get(_STEP, "")
    is_number = step.isdecimal() and step.isascii()
    is_shell = "SLURM_PTY_PORT" in environ
    return is_number and int(step) < _FIRST_SPECIAL_STEP and not is_shell


def allocation_of(environ: Environ) -> Allocation:
    """Return the machines that a process outside of a step may use.

    Raises:
        ValueError: SLURM's variables have values that cannot be read.
    """
    is_here = "SLURMD_NODENAME" in environ
    is_shell = "SLURM_PTY_PORT" in environ and _STEP_NODES in environ
    size = int(environ.get("SLURM_HET_SIZE", "1"))
    ends = [f"_HET_GROUP_{number}" for number in range(size)] if size > 1 else [""]
    lists = [environ[_JOB_NODES + end] for end in ends]
    if is_shell:
        ends, lists = [""], [environ[_STEP_NODES]]
    groups = tuple(tuple(read_nodelist(nodes)) for nodes in lists)
    cpus = tuple(tuple(read_repeated(environ[f"SLURM_JOB_CPUS_PER_NODE{end}"])) for end in ends)
    return Allocation(groups, cpus, is_here, environ[_STEP_NODES] if is_shell else "")


def _derive(environ: Environ) -> Entries:
    try:
        return _of_step(environ) if is_step(environ) else _of_job(environ)
    except (ValueError, KeyError, IndexError) as error:
        reason = f"{error.args[0]} is not set" if isinstance(error, KeyError) else error
        what = f"SLURM's variables cannot be read: {reason}"
        fix = "pass --num-machines, --machine-rank and --main-address, or --cluster none"
        return {"num_machines": faulty("num_machines", "1", JOB, what, fix)}


def _of_job(environ: Environ) -> Entries:
    """Return what is known before a step is made: one has to be, unless one machine is enough."""
    allocation = allocation_of(environ)
    entries = {"num_machines": Entry(str(allocation.num_machines), said_by(JOB))}
    if allocation.num_machines > 1:
        entries["main_address"] = Entry(allocation.groups[0][0], said_by(_JOB_NODES))
    return {**entries, **_processes(environ.get("SLURM_TASKS_PER_NODE", ""), 0)}


def _of_step(environ: Environ) -> Entries:
    entries = {
        "num_machines": Entry(environ["SLURM_STEP_NUM_NODES"], said_by("SLURM_STEP_NUM_NODES")),
        "machine_rank": Entry(environ["SLURM_NODEID"], said_by("SLURM_NODEID")),
        "main_address": Entry(_first_node(environ), said_by(_STEP_NODES)),
        "main_port": Entry(str(_port(environ)), said_by(_STEP, "from the numbers of job and step")),
    }
    task = _task(environ)
    if task is not None:
        count = Entry(str(task.local_world_size), said_by(_STEP_TASKS))
        return {**entries, "num_processes": count}
    job, _, tasks = environ.get(ALLOCATION_VARIABLE, "").partition(":")
    asked = _processes(tasks, _index(environ)) if job == environ[JOB] else {}
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


def _port(environ: Environ) -> int:
    """Return a port that all tasks of the step know, and that another step does not use."""
    job, step = int(environ[JOB]), int(environ[_STEP])
    return _FIRST_PORT + (64 * job + step) % _NUM_PORTS


def _task(environ: Environ) -> Task | None:
    """Return the place of this task where a machine has several of them, so that each is a rank."""
    if not is_step(environ):
        return None
    tasks = read_repeated(environ[_STEP_TASKS])
    if max(tasks) == 1:
        return None
    return Task(
        rank=int(environ["SLURM_PROCID"]),
        local_rank=int(environ["SLURM_LOCALID"]),
        world_size=sum(tasks),
        local_world_size=tasks[_index(environ)],
    )


def _index(environ: Environ) -> int:
    """Return the place of this machine in the step's lists, which SLURM_NODEID need not be."""
    return read_nodelist(environ[_STEP_NODES]).index(environ["SLURMD_NODENAME"])


def _is_here(environ: Environ) -> bool:
    return JOB in environ and _JOB_NODES in environ


SLURM = Cluster("slurm", _is_here, {}, _derive, _task)
