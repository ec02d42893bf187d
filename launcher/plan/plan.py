"""The plan of a launch, and its one-line summary."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from headway.ipc.origin import Layer
from headway.ipc.run_contract import Ranks
from headway.ipc.secrets import masked, masked_command
from headway.ipc.stderr import ranges, shown
from headway.launcher.plan.program import Program
from headway.machine.facts import Machine
from headway.settings.setting import VARIABLE_PREFIX, Value
from headway.settings.table import NO_CLUSTER, NODE, Settings


class LaunchPlan(NamedTuple):
    """The plan of a launch; `build_plan` creates it, `describe` prints it, `run` executes it."""

    program: Program
    python: Sequence[str]  # the interpreter and its flags
    settings: Settings
    machine: Machine
    inherited: Mapping[str, str]  # the launcher's environment, without the changes below
    gpus: tuple[int, ...]  # indices among the visible GPUs, one per process
    supervised: str | None  # why the launcher supervises the script; None: it does not
    in_process: bool  # the script runs in the launcher's interpreter
    task: Ranks | None = None  # this process's rank, if the scheduler starts each rank
    job: str = ""  # the id of the scheduler's job that the launch runs in
    began_at: float = 0.0  # start of the time limit, in seconds since the epoch
    environment: Mapping[str, Value] = {}  # changed variables; a value of None removes one
    notes: tuple[str, ...] = ()
    not_hooked: str | None = None  # why training libraries are not hooked

    @property
    def cpus(self) -> tuple[str, ...]:
        """The cores that each process is bound to, in Linux's list format; empty if unbound."""
        gpus = self.machine.visible_gpus if self.settings.numa_binding == NODE else ()
        return tuple(gpus[index].local_cpus for index in self.gpus) if gpus else ()

    @property
    def is_one_machine(self) -> bool:
        """Whether all ranks run on this machine and communicate over the loopback interface."""
        return self.settings.num_machines == 1

    @property
    def is_alone(self) -> bool:
        return self.is_one_machine and self.settings.num_processes == 1

    @property
    def reports_elsewhere(self) -> bool:
        """Whether another process of the run prints the messages that concern all processes."""
        is_in_cluster = self.task is not None or self.settings.cluster != NO_CLUSTER
        return is_in_cluster and not self.is_first

    @property
    def is_first(self) -> bool:
        """Whether this is the run's first machine or rank, which writes the run record."""
        return not (self.settings.machine_rank if self.task is None else self.task.rank)

    @property
    def is_single_rank(self) -> bool:
        """Whether a script that replaces the launcher gets a rank's variables, such as RANK.

        True only if a flag requests one process. Otherwise, the script is plain Python and may
        start processes itself. For example, Lightning starts processes only if RANK is not set.
        """
        is_by_flag = self.settings.origin("num_processes").layer is Layer.FLAG
        return self.supervised is None and self.task is None and is_by_flag and self.is_alone

    @property
    def is_rank(self) -> bool:
        """Whether the script gets the variables of a rank, from any source."""
        return self.supervised is not None or self.task is not None or self.is_single_rank


def summary(plan: LaunchPlan) -> str:
    settings = plan.settings
    processes = counted(settings.num_processes, "process", "processes")
    of = partial(_variable_of, settings)
    parts = [f"{processes}{of('num_processes')} on {settings.device}{of('device')}"]
    machines, rank = settings.num_machines, settings.machine_rank
    if machines > 1:
        place = f"one of {machines} machines" if rank is None else f"machine {rank} of {machines}"
        parts.append(place + of("num_machines"))
    if plan.task is not None:
        parts.append(f"rank {plan.task.rank} of {plan.task.world_size}")
    precision = "fp32" if settings.mixed_precision == "no" else settings.mixed_precision
    parts.append(f"precision {precision}{of('mixed_precision')}")
    for name in ("gradient_accumulation_steps", "max_restarts"):
        is_of_profile = settings.origin(name).layer in (Layer.USER_PROFILE, Layer.PROJECT_PROFILE)
        if source := of(name) or " (profile)" * is_of_profile:
            words = name.removesuffix("_steps").replace("_", " ")
            parts.append(f"{words} {settings.values[name].value}{source}")
    each = " each" if settings.num_processes > 1 else ""
    threads = counted(settings.threads_per_process, "thread", "threads")
    parts.append(threads + each + of("threads_per_process"))
    if plan.supervised is not None and settings.debug_rank is not None:
        parts.append(
            f"rank {settings.debug_rank} has the terminal (press Ctrl-C twice to stop the run)"
        )
    return f"{shown(plan.program.name)}: {', '.join(parts)}"


def _variable_of(settings: Settings, name: str) -> str:
    """Return, in parentheses, the name of another program's variable if the value came from one."""
    variable = settings.origin(name).variable
    return f" ({variable})" if variable and not variable.startswith(VARIABLE_PREFIX) else ""


def counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def without_secrets(plan: LaunchPlan) -> LaunchPlan:
    program = plan.program._replace(args=tuple(masked_command(plan.program.args)))
    environment = {
        name: change if change.value is None else change._replace(value=masked(name, change.value))
        for name, change in plan.environment.items()
    }
    settings = plan.settings.without_secrets()
    return plan._replace(program=program, environment=environment, settings=settings)


def text_of(value: object) -> str:
    if value is None or value == {}:
        return "-"
    if isinstance(value, dict):
        return " ".join(f"{name}={text}" for name, text in value.items())
    if type(value) is tuple:  # ranks
        return ranges(value)
    return str(value)
