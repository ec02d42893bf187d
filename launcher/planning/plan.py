"""Resolved settings + a machine -> a frozen LaunchPlan. Pure: no I/O, no torch.

Everything that cannot be honoured is refused, with all problems at once; nothing is changed
quietly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headway.errors import ConfigError, MachineError, Problem
from headway.launcher.planning.notes import notes
from headway.launcher.planning.program import Program
from headway.launcher.planning.supervision import program_problems, why_supervised
from headway.launcher.planning.variables import variables_of
from headway.machine.facts import Machine
from headway.settings.problems import problems as settings_problems
from headway.settings.table import Settings, Value

LOOPBACK = "127.0.0.1"


class LaunchPlan(NamedTuple):
    """All that a launch will do; `describe` prints one, `run` carries one out."""

    program: Program
    python: Sequence[str]  # and its own flags
    settings: Settings
    gpus: tuple[int, ...]  # indices among the visible GPUs, one for each process
    supervised: str | None  # why a launcher stays beside the script; None: the script replaces it
    in_process: bool  # nor replaces it: the script runs in the launcher's interpreter
    environment: Mapping[str, Value]  # what changes; a value of None means removed
    notes: tuple[str, ...]

    @property
    def is_one_machine(self) -> bool:
        """True when all ranks run here, so that nothing needs to leave the loopback device."""
        return self.settings.num_machines == 1


def build_plan(
    settings: Settings,
    machine: Machine,
    program: Program,
    *,
    python: Sequence[str],
    environ: Mapping[str, str],
    supervise: bool = False,
    in_process: bool = False,
    problems: Sequence[Problem] = (),
) -> LaunchPlan:
    """Return the plan of one launch.

    Args:
        settings: resolved.
        machine: this machine, or a recorded one.
        program: the user's script or module.
        python: the interpreter that runs it, and its own flags.
        environ: what the processes would inherit.
        supervise: keep the launcher beside a single process.
        in_process: run a single process in this interpreter.
        problems: what kept `try_resolve` from reading all of the settings; reported with all else.

    Raises:
        ConfigError: there are such problems, or settings contradict each other.
        MachineError: this machine cannot do what they ask.
    """
    found = [
        *problems,
        *program_problems(settings, program, python, supervise=supervise, in_process=in_process),
        *settings_problems(settings, machine),
    ]
    if found:
        is_of_machine = all(problem.is_of_machine for problem in found)
        raise (MachineError if is_of_machine else ConfigError).of(found)
    supervised = why_supervised(settings, supervise)
    gpus: tuple[int, ...] = ()
    if settings.device == "cuda":
        selected = settings.devices.select(machine.visible_gpus).indices
        gpus = selected[: settings.num_processes]
    return LaunchPlan(
        program=program,
        python=python,
        settings=settings,
        gpus=gpus,
        supervised=supervised,
        in_process=in_process,
        environment=variables_of(settings, machine, gpus, supervised, environ),
        notes=tuple(notes(settings, machine, program, supervised, in_process)),
    )
