"""Builds a frozen LaunchPlan from resolved settings and a machine, without I/O and without torch.

Unusable settings are never changed silently. They are rejected in one error with all problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from headway.devices.table import kind_of
from headway.errors import Code, ConfigError, MachineError, Problem
from headway.ipc.run_contract import Ranks
from headway.launcher.plan.notes import notes
from headway.launcher.plan.plan import LaunchPlan
from headway.launcher.plan.program import Program
from headway.launcher.plan.variables import variables_of
from headway.machine.facts import Machine
from headway.settings.problems import problems as settings_problems
from headway.settings.table import NODE, TABLE, YES, Settings

_ONE_EACH = "srun --ntasks-per-node=1, or mpirun --map-by ppr:1:node"


def build_plan(
    settings: Settings,
    machine: Machine,
    program: Program,
    *,
    python: Sequence[str],
    environ: Mapping[str, str],
    supervise: bool = False,
    in_process: bool = False,
    began_at: float = 0.0,
    problems: Sequence[Problem] = (),
    task: Ranks | None = None,
    job: str = "",
) -> LaunchPlan:
    """Build the plan of a launch.

    The `problems` that `try_resolve` found are reported together with the plan's problems. The
    other arguments correspond to the fields of `LaunchPlan`.

    Raises:
        ConfigError: if there are `problems`, or if settings contradict each other.
        MachineError: if the only problems are settings that this machine does not support.
    """
    needing = _launcher_setting(settings, is_rank=task is not None)
    supervised = "--supervise is set" if supervise else None
    if needing is not None:
        supervised = f"{needing} is {settings.values[needing].value}"
    if supervised is None and settings.replace_accelerate == YES and program.is_python:
        in_process = True  # Accelerate must be replaced before the script's first line
    plan = LaunchPlan(
        program=program,
        python=python,
        settings=settings,
        machine=machine,
        inherited=environ,
        gpus=_gpus(settings, machine),
        supervised=supervised,
        in_process=in_process,
        task=task,
        job=job,
        began_at=began_at,
    )
    found = [*problems, *_program_problems(plan, needing), *settings_problems(settings, machine)]
    if not found:
        found += _binding_problems(plan)
    if task is not None:
        found = [p for p in found if p.code != Code.TOO_FEW_GPUS]  # reported on the next line
        found += _task_problems(plan, task)
    if found:
        is_of_machine = all(problem.is_of_machine for problem in found)
        raise (MachineError if is_of_machine else ConfigError).of(found)
    plan = plan._replace(environment=variables_of(plan), not_hooked=_unhooked_reason(plan))
    return plan._replace(notes=notes(plan))


def _gpus(settings: Settings, machine: Machine) -> tuple[int, ...]:
    if not kind_of(settings.device).is_numbered:
        return ()
    selected = settings.devices.select(machine.gpus_of(settings.device)).indices
    return selected[: settings.num_processes]


def _launcher_setting(settings: Settings, *, is_rank: bool) -> str | None:
    """Return a setting that requires a launcher to supervise the script; None if none does."""
    for name in ("num_processes", "num_machines"):
        if settings.values[name].value > 1 and not is_rank:
            return name
    for name, row in TABLE.items():
        if row.needs_launcher and settings.values[name].value != row.default:
            return name
    return None


def _unhooked_reason(plan: LaunchPlan) -> str | None:
    """Return the reason why training libraries are not hooked; None if they are hooked.

    Libraries are hooked in all ranks under a launcher. In a single process without a launcher, they
    are hooked only if a setting for Trainers is set, or in a job, because jobs can be preempted.
    """
    settings = plan.settings
    if settings.library_hooks != YES:
        return settings.where("library_hooks")
    if not plan.program.is_python:
        return "the program is not a Python script"
    asked = any(settings.are_user_set(name) for name in ("library_hooks", "resume", "time_limit"))
    if asked or plan.supervised is not None or plan.in_process or plan.job:
        return None
    return f"a single process is plain Python ({TABLE['library_hooks'].as_flag(YES)} hooks them)"


def _program_problems(plan: LaunchPlan, needing: str | None) -> Iterator[Problem]:
    settings, program, supervised = plan.settings, plan.program, plan.supervised
    if plan.in_process and supervised is not None:
        origin = "flag --supervise" if needing is None else settings.where(needing)
        yield Problem(
            f"--in-process runs one process without a launcher, but {supervised}",
            f"flag --in-process; {origin}",
            "pass --num-processes 1, and remove settings that need a launcher",
            code=Code.LAUNCHER_IN_PROCESS,
            names=() if needing is None else (needing,),
        )
    if plan.in_process and not program.is_python:
        yield Problem(
            f"--in-process runs only Python, but --no-python runs {program.name} without Python",
            "flag --in-process; flag --no-python",
            "remove one of the flags",
            code=Code.PROGRAM_IN_PROCESS,
        )
    if supervised is not None and program.is_stream:
        yield Problem(
            f"ranks under a launcher cannot read the script {program.name!r} from a pipe or "
            f"descriptor, but {supervised}",
            "the command line",
            "save the script to a file, or run a single process without a launcher",
            code=Code.SCRIPT_FROM_STREAM,
        )


def _binding_problems(plan: LaunchPlan) -> Iterator[Problem]:
    if plan.settings.numa_binding == NODE and not (plan.cpus and all(plan.cpus)):
        yield Problem(
            "numa_binding is 'node', but the cores close to each rank's device are unknown: "
            f"the device is {plan.settings.device}, and Linux reports them only for NVIDIA GPUs",
            plan.settings.where("numa_binding"),
            "pass --numa-binding off, or start the ranks under numactl",
            names=("numa_binding",),
            is_of_machine=True,
            code=Code.UNSUPPORTED_HERE,
        )


def _task_problems(plan: LaunchPlan, task: Ranks) -> list[Problem]:
    settings = plan.settings
    tasks = task.local_world_size
    what = []
    if settings.num_processes != tasks:
        what.append(f"num_processes is {settings.num_processes}")
    debugged = None if settings.debug_rank is None else f"debug_rank is {settings.debug_rank}"
    if reason := plan.supervised or debugged:
        what.append(f"{reason}, which needs a single launcher for all ranks of a machine")
    gpus = len(plan.machine.gpus_of(settings.device))
    if kind_of(settings.device).is_numbered and gpus < tasks:
        what.append(f"this process sees only {gpus} GPU{'s' * (gpus != 1)}")
    started = (
        f"{settings.cluster} started {tasks} task{'s' * (tasks != 1)} here, each of which is a rank"
    )
    where = settings.where("num_processes", "cluster")
    fix = f"start one task on each machine: {_ONE_EACH}"
    return [Problem(f"{text}, but {started}", where, fix, code=Code.TASKS) for text in what]
