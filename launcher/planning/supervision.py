"""Why a launcher stays beside the script, what it shows of the ranks, and what contradicts that."""

from __future__ import annotations

from collections.abc import Sequence

from headway.errors import ConfigError, Problem
from headway.launcher.planning.program import Program
from headway.settings.table import TABLE, Settings


def why_supervised(settings: Settings, supervise: bool) -> str | None:
    """Return why the launcher stays; None: the script may replace it."""
    name = _setting_for_a_launcher(settings)
    if name is not None:
        return f"{name} is {settings.values[name].value}"
    return "--supervise" if supervise else None


def _setting_for_a_launcher(settings: Settings) -> str | None:
    for name in ("num_processes", "num_machines"):
        if settings.values[name].value > 1:
            return name
    for name, row in TABLE.items():
        if row.needs_launcher and settings.values[name].value != row.default:
            return name
    return None


def contradictions_of_ranks(settings: Settings) -> list[Problem]:
    """Return what is wrong with the ranks that are to be shown or debugged."""
    if settings.num_machines > 1:
        if settings.debug_rank is None:
            return []
        return settings.problem(
            f"debug_rank is {settings.debug_rank}, but num_machines is "
            f"{settings.num_machines}: the ranks of other machines would not wait for it",
            "debug on one machine; --cpu --num-processes N gives it N ranks",
            "debug_rank",
            "num_machines",
        )
    processes, debug_rank = settings.num_processes, settings.debug_rank
    problems = _missing_ranks(settings, processes)
    if debug_rank is not None and debug_rank >= processes:
        problems += _missing_rank(settings, "debug_rank", debug_rank, processes)
    return problems


def refuse_missing_ranks(settings: Settings, world_size: int) -> None:
    """Refuse ranks on the console that are not there; only at the rendezvous is it known how many
    several machines have.

    Raises:
        ConfigError: `ranks` names one that is not below `world_size`.
    """
    if problems := _missing_ranks(settings, world_size):
        raise ConfigError.of(problems)


def _missing_ranks(settings: Settings, world_size: int) -> list[Problem]:
    missing = [rank for rank in settings.ranks or () if rank >= world_size]
    return _missing_rank(settings, "ranks", missing[0], world_size) if missing else []


def _missing_rank(settings: Settings, name: str, rank: int, world_size: int) -> list[Problem]:
    there = f"ranks are from 0 to {world_size - 1}" if world_size > 1 else "the only rank is 0"
    return settings.problem(
        f"{name} names rank {rank}, but {there}",
        "leave it out, or start more processes",
        name,
        "num_processes",
    )


def contradictions_of_flags(python: Sequence[str], supervised: str) -> list[Problem]:
    """Return what is wrong with Python's own flags where a launcher stays beside the script."""
    if "-i" not in python:
        return []
    return [
        Problem(
            f"python -i shows a prompt after the script, which a rank has no place for, "
            f"but {supervised}",
            "Python's flag -i",
            "leave -i out, or run one process",
        )
    ]


def contradictions_in_process(
    settings: Settings, program: Program, supervise: bool
) -> list[Problem]:
    """Return what keeps the program from running in the launcher's interpreter."""
    problems = []
    why = why_supervised(settings, supervise)
    if why is not None:
        name = _setting_for_a_launcher(settings)
        origin = "flag --supervise" if name is None else settings.where(name)
        problems.append(
            Problem(
                f"--in-process runs one process with no launcher beside it, but {why}",
                f"flag --in-process; {origin}",
                "pass --num-processes 1, and leave out what needs a launcher",
            )
        )
    if program.kind == "program":
        problems.append(
            Problem(
                f"--in-process runs Python, and {program.name} is a program of its own",
                "flag --in-process; flag --no-python",
                "leave one of the two out",
            )
        )
    return problems


def notes_on_supervision(
    settings: Settings, program: Program, supervised: str | None, in_process: bool
) -> list[str]:
    """Return what the run will do otherwise than it may seem."""
    notes = []
    if settings.debug_rank is not None and supervised is not None:
        if settings.log_dir is not None:
            notes.append(f"rank {settings.debug_rank} writes to the terminal, and into no log file")
        if program.kind == "program":
            notes.append(f"debug_rank suspends no timeouts in {program.name}: it is no script")
    for name in settings.env:
        if in_process and name.startswith(("PYTHON", "LD_", "DYLD_")):
            notes.append(f"env sets {name}, which a process reads at its start: too late here")
    return notes
