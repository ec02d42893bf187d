"""What one launch will be: a frozen value, and its summary in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headway.contract.origin import Layer
from headway.contract.run import Ranks
from headway.launcher.plan.program import Program
from headway.machine.facts import Machine
from headway.settings.setting import Value
from headway.settings.table import NO_CLUSTER, Settings


class LaunchPlan(NamedTuple):
    """The plan of a launch; `build_plan` makes it, `describe` prints it, `run` executes it."""

    program: Program
    python: Sequence[str]  # and its own flags
    settings: Settings
    machine: Machine
    inherited: Mapping[str, str]  # the environment, which `environment` changes
    gpus: tuple[int, ...]  # indices among the visible GPUs, one for each process
    supervised: str | None  # why the launcher supervises the script; None: the script replaces it
    in_process: bool  # the script runs in the launcher's interpreter
    task: Ranks | None = None  # this process's place, where its scheduler starts each rank
    job: str = ""  # the id of the scheduler's job that the launch runs in
    began_at: float = 0.0  # from which the time limit counts, in seconds since the epoch
    environment: Mapping[str, Value] = {}  # what changes; None removes a variable
    notes: tuple[str, ...] = ()
    not_hooked: str | None = None  # why no training library is

    @property
    def is_one_machine(self) -> bool:
        """Whether all ranks run on this machine and communicate over the loopback interface."""
        return self.settings.num_machines == 1

    @property
    def is_alone(self) -> bool:
        return self.is_one_machine and self.settings.num_processes == 1

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
        """Whether a script that replaces the launcher finds the variables of a rank.

        Only where the flag asks for one process. Otherwise the script is plain Python, and may make
        its own processes: Lightning, for one, would take this process for one of several.
        """
        is_by_flag = self.settings.origin("num_processes").layer is Layer.FLAG
        return self.supervised is None and self.task is None and is_by_flag and self.is_alone

    @property
    def is_rank(self) -> bool:
        """Whether the script finds the variables of a rank, whoever sets them."""
        return self.supervised is not None or self.task is not None or self.is_world_of_one


def summary(plan: LaunchPlan) -> str:
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
    return f"{printable(plan.program.name)}: {', '.join(parts)}"


def place_of(settings: Settings) -> str:
    if settings.machine_rank is None:
        return f"one of {settings.num_machines} machines"
    return f"machine {settings.machine_rank} of {settings.num_machines}"


def counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def printable(text: str) -> str:
    """Return `text` with control characters escaped, as in Python's strings."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
