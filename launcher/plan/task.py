"""A launch that its scheduler has started once for each rank becomes that rank."""

from __future__ import annotations

from headway.contract.run import WORLD_OF_ONE, Ranks
from headway.devices.table import kind_of
from headway.errors import Code, Problem
from headway.machine.facts import Machine
from headway.settings.setting import Value
from headway.settings.table import Settings

_ONE_EACH = "srun --ntasks-per-node=1, or mpirun --map-by ppr:1:node"


def task_problems(
    task: Ranks, settings: Settings, machine: Machine, supervised: str | None
) -> list[Problem]:
    """Return why this process cannot be the rank that its scheduler has started it as.

    Args:
        task: its place.
        settings: resolved.
        machine: as this process sees it.
        supervised: why a launcher would have to stay beside the rank.
    """
    cluster, tasks = settings.cluster, task.local_world_size
    what = []
    if settings.num_processes != tasks:
        what.append(f"num_processes is {settings.num_processes}")
    debugged = None if settings.debug_rank is None else f"debug_rank is {settings.debug_rank}"
    if reason := supervised or debugged:
        what.append(f"{reason}, which needs one launcher for all ranks of a machine")
    gpus = len(machine.gpus_of(settings.device))
    if kind_of(settings.device).is_numbered and gpus < tasks:
        what.append(f"this process sees {gpus} GPU{'s' * (gpus != 1)} only")
    started = (
        f"{cluster} has started {tasks} task{'s' * (tasks != 1)} here, each of which is a rank"
    )
    where = settings.where("num_processes", "cluster")
    fix = f"start one task on each machine: {_ONE_EACH}"
    return [Problem(f"{one}, but {started}", where, fix, code=Code.TASKS) for one in what]


def task_variables(task: Ranks, settings: Settings, main_address: str) -> dict[str, Value]:
    """Return the variables of this process's rank, as torch's launcher sets them."""
    origin = settings.origin("cluster")
    rank, world_size = str(task.rank), str(task.world_size)
    variables = {
        **WORLD_OF_ONE,
        **dict.fromkeys(("RANK", "ROLE_RANK"), rank),
        **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), world_size),
        "LOCAL_RANK": str(task.local_rank),
        "LOCAL_WORLD_SIZE": str(task.local_world_size),
        "GROUP_RANK": str(settings.machine_rank),
        "GROUP_WORLD_SIZE": str(settings.num_machines),
    }
    place = {
        "MASTER_ADDR": Value(main_address, settings.origin("main_address")),
        "MASTER_PORT": Value(str(settings.main_port), settings.origin("main_port")),
    }
    return {name: Value(text, origin) for name, text in variables.items()} | place
