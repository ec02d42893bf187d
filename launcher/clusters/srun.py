"""A launch inside a job of SLURM, outside of any step, becomes one step over the job's machines.

srun starts the same command once on each machine, where it finds the variables of the step.
Source: `man srun`, input environment variables, and options of heterogeneous jobs.
"""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from shutil import which
from typing import NamedTuple, NoReturn

from headway.contract.run import ALLOCATION_VARIABLE, JOB_VARIABLE, KEY_VARIABLE
from headway.errors import ConfigError, LaunchError
from headway.launcher.clusters.row import Environ
from headway.launcher.clusters.slurm import (
    SLURM,
    Allocation,
    allocation_of,
    is_step,
    tasks_asked_for,
)
from headway.settings.table import Settings

_PLACE = ("machine_rank", "main_address")
_OF_STEPS = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK"),
    *("SLURM_GPUS_PER_TASK", "SLURM_DISTRIBUTION", "SLURM_PTY_", "SLURM_CPU_BIND"),
)
"""How the names of variables begin that srun would take for options of the step."""


class Step(NamedTuple):
    """The step that a launch becomes."""

    command: tuple[str, ...]
    environment: dict[str, str]
    job: str
    num_machines: int


def step_of(
    environ: Environ, settings: Settings, launch: Sequence[str], *, has_terminal: bool
) -> Step | None:
    """Return the step that a launch is to become; None if it runs where it is.

    A job on one machine gets a step too, since SLURM signals steps, and not a batch script: before
    its time is up, and when it is preempted. A person's own terminal is worth more.

    Args:
        environ: of this process.
        settings: resolved, without a problem. Whoever says which machine this is, or where machine
            0 is, starts the launch on each machine by hand.
        launch: the command of the launch.
        has_terminal: a person sees what it prints as it comes.

    Raises:
        ConfigError: the job has fewer machines than are asked for.
        LaunchError: this process is in a step already, and does not see that it is.
    """
    is_by_hand = any(settings.are_user_set(name) for name in _PLACE)
    if settings.cluster != SLURM.name or is_step(environ) or is_by_hand:
        return None
    allocation = allocation_of(environ)
    machines = settings.num_machines
    is_kept_here = settings.are_user_set("num_machines") and machines == 1
    is_enough = has_terminal or which("srun", path=environ.get("PATH")) is None
    if is_kept_here or (machines == 1 and allocation.is_here and is_enough):
        return None
    job = environ[JOB_VARIABLE]
    if KEY_VARIABLE in environ and environ.get(ALLOCATION_VARIABLE, "").startswith(f"{job}:"):
        raise LaunchError(
            "srun has started this launch, but it has no variables of a step",
            where=f"{ALLOCATION_VARIABLE}={environ[ALLOCATION_VARIABLE]}, without SLURM_STEP_ID",
            fix="do not unset the variables of SLURM in the job; or pass --cluster none",
        )
    _check_number(allocation, settings)
    words = [*launch] if ":" not in launch else ["sh", "-c", f"exec {shlex.join(launch)}"]
    return Step(
        command=(*_srun(allocation, machines), *words),
        environment=_environment(environ),
        job=job,
        num_machines=machines,
    )


def run_step(step: Step) -> NoReturn:
    """Replace this process by the step's srun; the exit code is the highest of its tasks.

    Raises:
        LaunchError: srun cannot be run.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # it cannot be written to, as the step will find out
            stream.flush()
    try:
        os.execvpe(step.command[0], step.command, step.environment)
    except OSError as error:
        raise LaunchError(
            f"srun cannot be run, which reaches the {step.num_machines} machines of this job: "
            f"{error.strerror}",
            where=f"{JOB_VARIABLE}={step.environment[JOB_VARIABLE]}",
            fix="start it by srun outside of the container, with --ntasks-per-node=1; or pass "
            "--num-machines 1 for a run on this machine alone",
        ) from None


def _check_number(allocation: Allocation, settings: Settings) -> None:
    there, asked = allocation.num_machines, settings.num_machines
    is_heterogeneous = len(allocation.groups) > 1
    if asked > there or (is_heterogeneous and asked < there):
        kind = "heterogeneous job, which is used as a whole," if is_heterogeneous else "job"
        raise ConfigError(
            f"num_machines is {asked}, but this {kind} has {there}",
            where=settings.where("num_machines"),
            fix="leave num_machines out: it is then the number of the job",
        )


def _srun(allocation: Allocation, machines: int) -> list[str]:
    """Return srun with its options: one task for each machine, with all of the job's CPUs there.

    The launchers end each other: those of ranks that still save must not be killed by srun. Other
    steps, a shell's or a second launch's, may use the same CPUs and GPUs.
    """
    cpus = min(count for group in allocation.cpus for count in group)
    words = ["srun", "--export=ALL", "--overlap", "--kill-on-bad-exit=0", "--wait=0", "--input=0"]
    words += ["--disable-status", "--ntasks-per-node=1", f"--cpus-per-task={cpus}"]
    if len(allocation.groups) > 1:
        return [*words, f"--het-group=0-{len(allocation.groups) - 1}"]
    words += [f"--nodes={machines}", f"--ntasks={machines}"]
    if allocation.shell_nodes:
        words.append(f"--nodelist={allocation.shell_nodes}")
    return words


def _environment(environ: Environ) -> dict[str, str]:
    """Return the environment of the step, with a secret that only its launchers know."""
    inherited = {name: text for name, text in environ.items() if not name.startswith(_OF_STEPS)}
    return {
        KEY_VARIABLE: secrets.token_hex(32),
        **inherited,
        ALLOCATION_VARIABLE: f"{environ[JOB_VARIABLE]}:{tasks_asked_for(environ)}",
    }
