"""Why a launcher stays beside the script, and whether the program can run in that way."""

from __future__ import annotations

from collections.abc import Sequence

from headway.errors import Code, ConfigError, Problem
from headway.launcher.planning.program import Program
from headway.settings.problems import missing_ranks
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


def refuse_missing_ranks(settings: Settings, world_size: int) -> None:
    """Refuse ranks on the console that are not there; only at the rendezvous is it known how many
    several machines have.

    Raises:
        ConfigError: `ranks` names one that is not below `world_size`.
    """
    if found := missing_ranks(settings, world_size):
        raise ConfigError.of(found)


def program_problems(
    settings: Settings,
    program: Program,
    python: Sequence[str],
    *,
    supervise: bool,
    in_process: bool,
) -> list[Problem]:
    """Return what keeps the program from running in the way that is asked for."""
    supervised = why_supervised(settings, supervise)
    found = []
    if in_process and supervised is not None:
        name = _setting_for_a_launcher(settings)
        origin = "flag --supervise" if name is None else settings.where(name)
        found.append(
            Problem(
                f"--in-process runs one process with no launcher beside it, but {supervised}",
                f"flag --in-process; {origin}",
                "pass --num-processes 1, and leave out what needs a launcher",
                code=Code.LAUNCHER_IN_PROCESS,
                names=() if name is None else (name,),
            )
        )
    if in_process and program.kind == "program":
        found.append(
            Problem(
                f"--in-process runs Python, and {program.name} is a program of its own",
                "flag --in-process; flag --no-python",
                "leave one of the two out",
                code=Code.PROGRAM_IN_PROCESS,
            )
        )
    if supervised is not None and "-i" in python:
        found.append(
            Problem(
                "python -i shows a prompt after the script, which a rank has no place for, "
                f"but {supervised}",
                "Python's flag -i",
                "leave -i out, or run one process",
                code=Code.PYTHON_PROMPT,
            )
        )
    return found
