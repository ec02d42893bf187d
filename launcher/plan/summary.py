"""Describes a plan in one line, which each launch prints: nothing is imported for it."""

from __future__ import annotations

from headway.launcher.plan.plan import LaunchPlan
from headway.settings.table import TABLE, Settings


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
    if plan.supervised is not None or plan.task is not None or plan.is_world_of_one:
        return ""
    return f"; no RANK, LOCAL_RANK, ... ({TABLE['num_processes'].flag} 1 sets them)"


def counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def printable(text: str) -> str:
    """Return `text` with control characters escaped, as in Python's strings."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
