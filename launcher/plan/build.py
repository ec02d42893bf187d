"""Resolved settings + a machine -> a frozen LaunchPlan. Pure: no I/O, no torch.

Settings that cannot be used are rejected, with all problems at once; none is changed silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.contract.run import Ranks
from headway.devices.table import kind_of
from headway.errors import Code, ConfigError, MachineError, Problem
from headway.launcher.plan.notes import notes
from headway.launcher.plan.plan import LaunchPlan
from headway.launcher.plan.program import Program
from headway.launcher.plan.supervision import (
    program_problems,
    task_problems,
    why_not_hooked,
    why_supervised,
)
from headway.launcher.plan.variables import variables_of
from headway.machine.facts import Machine
from headway.settings.problems import problems as settings_problems
from headway.settings.table import YES, Settings


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
    """Return the plan of one launch.

    `problems`, those that `try_resolve` found, are reported with all others; the other arguments
    are as in `LaunchPlan`.

    Raises:
        ConfigError: there are such problems, or settings contradict each other.
        MachineError: this machine cannot do what they request.
    """
    supervised = why_supervised(settings, supervise, task)
    if supervised is None and settings.replace_accelerate == YES and program.kind != "program":
        in_process = True  # before the script's first line
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
    found = [*problems, *program_problems(plan), *settings_problems(settings, machine)]
    if task is not None:
        found = [one for one in found if one.code is not Code.TOO_FEW_GPUS]  # explained below
        found += task_problems(plan, task)
    if found:
        is_of_machine = all(problem.is_of_machine for problem in found)
        raise (MachineError if is_of_machine else ConfigError).of(found)
    return plan._replace(
        environment=variables_of(plan), notes=notes(plan), not_hooked=why_not_hooked(plan)
    )


def _gpus(settings: Settings, machine: Machine) -> tuple[int, ...]:
    if not kind_of(settings.device).is_numbered:
        return ()
    selected = settings.devices.select(machine.gpus_of(settings.device)).indices
    return selected[: settings.num_processes]
