"""Resolved settings + a machine -> a frozen LaunchPlan. Pure: no I/O, no torch.

Settings that cannot be used are rejected, with all problems at once; none is changed silently. Each
launch prints its plan in one line; `describe.py` has it in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headway.contract.run import Ranks
from headway.devices.table import kind_of
from headway.errors import Code, ConfigError, MachineError, Problem
from headway.launcher.plan.accelerate import accelerate_problems
from headway.launcher.plan.notes import notes
from headway.launcher.plan.program import Program
from headway.launcher.plan.supervision import (
    is_world_of_one,
    program_problems,
    task_problems,
    why_not_joined,
    why_supervised,
)
from headway.launcher.plan.variables import variables_of
from headway.machine.facts import Machine
from headway.settings.problems import problems as settings_problems
from headway.settings.setting import Value
from headway.settings.table import NO_CLUSTER, TABLE, YES, Settings


class LaunchPlan(NamedTuple):
    """The plan of a launch; `describe` prints it, `run` executes it."""

    program: Program
    python: Sequence[str]  # and its own flags
    settings: Settings
    gpus: tuple[int, ...]  # indices among the visible GPUs, one for each process
    supervised: str | None  # why the launcher supervises the script; None: the script replaces it
    in_process: bool  # the script runs in the launcher's interpreter
    environment: Mapping[str, Value]  # what changes; a value of None means removed
    notes: tuple[str, ...]
    task: Ranks | None = None  # this process's place, where its scheduler starts each rank
    estimated_bytes: int | None = None  # what tensors were estimated to take on each rank
    not_joined: str | None = None  # why no training library is

    @property
    def is_one_machine(self) -> bool:
        """Whether all ranks run on this machine and communicate over the loopback interface."""
        return self.settings.num_machines == 1

    @property
    def is_told_elsewhere(self) -> bool:
        """Whether another process of the same cluster prints what holds for all of them."""
        if self.task is not None:
            return self.task.rank > 0
        return self.settings.cluster != NO_CLUSTER and bool(self.settings.machine_rank)

    @property
    def is_first(self) -> bool:
        """Whether this process is the run's first machine, or rank: the one that has its record."""
        return not (self.settings.machine_rank if self.task is None else self.task.rank)

    @property
    def is_world_of_one(self) -> bool:
        """Whether the script, without a launcher beside it, finds the variables of a rank."""
        is_replaced = self.supervised is None and self.task is None
        return is_replaced and is_world_of_one(self.settings)

    @property
    def is_rank(self) -> bool:
        """Whether the script finds the variables of a rank, whoever sets them."""
        return self.supervised is not None or self.task is not None or self.is_world_of_one


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
    estimated_bytes: int | None = None,
) -> LaunchPlan:
    """Return the plan of one launch.

    The processes inherit `environ`; `began_at`, from which the time limit counts, is in seconds
    since the epoch; `problems`, those that `try_resolve` found, are reported with all others;
    `task` is this process's place, if its scheduler has started it as one of several ranks.

    Raises:
        ConfigError: there are such problems, or settings contradict each other.
        MachineError: this machine cannot do what they request.
    """
    supervised = why_supervised(settings, supervise, task)
    if supervised is None and settings.replace_accelerate == YES and program.kind != "program":
        in_process = True  # before the script's first line
    found = [
        *problems,
        *program_problems(
            settings, program, python, supervise=supervise, in_process=in_process, task=task
        ),
        *accelerate_problems(settings, program),
        *settings_problems(settings, machine),
    ]
    if task is not None:
        found = [one for one in found if one.code is not Code.TOO_FEW_GPUS]  # explained below
        found += task_problems(task, settings, machine, supervised)
    if found:
        is_of_machine = all(problem.is_of_machine for problem in found)
        raise (MachineError if is_of_machine else ConfigError).of(found)
    gpus: tuple[int, ...] = ()
    if kind_of(settings.device).is_numbered:
        selected = settings.devices.select(machine.gpus_of(settings.device)).indices
        gpus = selected[: settings.num_processes]
    return LaunchPlan(
        program=program,
        python=python,
        settings=settings,
        gpus=gpus,
        supervised=supervised,
        in_process=in_process,
        environment=variables_of(
            settings, machine, gpus, supervised, environ, began_at, task, estimated_bytes
        ),
        notes=tuple(notes(settings, machine, program, supervised, in_process)),
        task=task,
        estimated_bytes=estimated_bytes,
        not_joined=why_not_joined(settings, program, supervised, in_process),
    )


def summary(plan: LaunchPlan) -> str:
    """Return the plan in one line."""
    settings = plan.settings
    processes = counted(settings.num_processes, "process", "processes")
    parts = [f"{processes} on {settings.device}"]
    if settings.num_machines > 1:
        parts.append(place_of(settings))
    if plan.task is not None:
        parts.append(f"rank {plan.task.rank} of {plan.task.world_size}")
    parts.append(
        f"precision {'fp32' if settings.mixed_precision == 'no' else settings.mixed_precision}"
    )
    each = " each" if settings.num_processes > 1 else ""
    parts.append(counted(settings.threads_per_process, "thread", "threads") + each)
    if plan.supervised is not None and settings.debug_rank is not None:
        parts.append(f"rank {settings.debug_rank} has the terminal (Ctrl-C twice ends the run)")
    return f"{printable(plan.program.name)}: {', '.join(parts)}{_without_rank(plan)}"


def place_of(settings: Settings) -> str:
    if settings.machine_rank is None:
        return f"one of {settings.num_machines} machines"
    return f"machine {settings.machine_rank} of {settings.num_machines}"


def _without_rank(plan: LaunchPlan) -> str:
    """Say what a script for torchrun lacks; once it has replaced the launcher, none can say so."""
    if plan.is_rank:
        return ""
    return f"; no RANK, LOCAL_RANK, ... ({TABLE['num_processes'].flag} 1 sets them)"


def counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def printable(text: str) -> str:
    """Return `text` with control characters escaped, as in Python's strings."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
