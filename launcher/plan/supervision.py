"""Decides whether the launcher stays beside the script, and whether training libraries are hooked;
and checks that program and scheduler allow it.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.contract.run import Ranks
from headway.devices.table import kind_of
from headway.errors import Code, ConfigError, Problem
from headway.launcher.plan.plan import LaunchPlan
from headway.settings.problems import missing_ranks
from headway.settings.table import TABLE, YES, Settings

_ONE_EACH = "srun --ntasks-per-node=1, or mpirun --map-by ppr:1:node"


def why_supervised(settings: Settings, supervise: bool, task: Ranks | None = None) -> str | None:
    """Return why the launcher supervises the script; None: the script may replace it.

    The command line may ask for it by `supervise`; a `task` is one of several ranks already.
    """
    name = _setting_for_a_launcher(settings, is_rank=task is not None)
    if name is not None:
        return f"{name} is {settings.values[name].value}"
    return "--supervise" if supervise else None


def _setting_for_a_launcher(settings: Settings, *, is_rank: bool) -> str | None:
    for name in ("num_processes", "num_machines"):
        if settings.values[name].value > 1 and not is_rank:
            return name
    for name, row in TABLE.items():
        if row.needs_launcher and settings.values[name].value != row.default:
            return name
    return None


def why_not_hooked(plan: LaunchPlan) -> str | None:
    """Return why no training library is hooked in the script's process; None: each is, once the
    script imports it.

    The rule: ranks under a launcher are hooked, and one process without a launcher is plain Python,
    unless it is a job, which may be preempted, or a setting that a Trainer obeys is set for it.
    """
    settings = plan.settings
    if settings.library_hooks != YES:
        return settings.where("library_hooks")
    if plan.program.kind == "program":
        return "it is not a Python script"
    asked = any(settings.are_user_set(name) for name in ("library_hooks", "resume", "time_limit"))
    if asked or plan.supervised is not None or plan.in_process or plan.job:
        return None
    return f"one process is plain Python ({TABLE['library_hooks'].as_flag(YES)} hooks them)"


def refuse_missing_ranks(settings: Settings, world_size: int) -> None:
    """Check `ranks` against the world size, which on several machines is known only after the
    rendezvous.

    Raises:
        ConfigError: `ranks` contains one that is not below `world_size`.
    """
    if found := missing_ranks(settings, world_size):
        raise ConfigError.of(found)


def program_problems(plan: LaunchPlan) -> Iterator[Problem]:
    """Yield why the program cannot run in the requested way."""
    settings, program, supervised = plan.settings, plan.program, plan.supervised
    if plan.in_process and supervised is not None:
        name = _setting_for_a_launcher(settings, is_rank=plan.task is not None)
        origin = "flag --supervise" if name is None else settings.where(name)
        yield Problem(
            f"--in-process runs one process without a launcher, but {supervised}",
            f"flag --in-process; {origin}",
            "pass --num-processes 1, and remove settings that need a launcher",
            code=Code.LAUNCHER_IN_PROCESS,
            names=() if name is None else (name,),
        )
    if plan.in_process and program.kind == "program":
        yield Problem(
            f"--in-process runs Python, but {program.name} is another program",
            "flag --in-process; flag --no-python",
            "remove one of the two",
            code=Code.PROGRAM_IN_PROCESS,
        )
    if supervised is not None and program.is_stream:
        yield Problem(
            f"the script {program.name!r} is read from a pipe or descriptor, which ranks under "
            f"a launcher cannot, but {supervised}",
            "the command line",
            "save the script to a file, or run one process without a launcher",
            code=Code.SCRIPT_FROM_STREAM,
        )
    if supervised is not None and "-i" in plan.python:
        yield Problem(
            "python -i shows a prompt after the script, which ranks under a launcher cannot, "
            f"but {supervised}",
            "Python's flag -i",
            "remove -i, or run one process",
            code=Code.PYTHON_PROMPT,
        )


def task_problems(plan: LaunchPlan, task: Ranks) -> list[Problem]:
    """Return why this process cannot be the rank that its scheduler has started it as."""
    settings = plan.settings
    tasks = task.local_world_size
    what = []
    if settings.num_processes != tasks:
        what.append(f"num_processes is {settings.num_processes}")
    debugged = None if settings.debug_rank is None else f"debug_rank is {settings.debug_rank}"
    if reason := plan.supervised or debugged:
        what.append(f"{reason}, which needs one launcher for all ranks of a machine")
    gpus = len(plan.machine.gpus_of(settings.device))
    if kind_of(settings.device).is_numbered and gpus < tasks:
        what.append(f"this process sees {gpus} GPU{'s' * (gpus != 1)} only")
    started = (
        f"{settings.cluster} has started {tasks} task{'s' * (tasks != 1)} here, each of which is "
        "a rank"
    )
    where = settings.where("num_processes", "cluster")
    fix = f"start one task on each machine: {_ONE_EACH}"
    return [Problem(f"{one}, but {started}", where, fix, code=Code.TASKS) for one in what]
