"""Decides whether the launcher supervises the script, and checks that the program allows it."""

from __future__ import annotations

from collections.abc import Sequence

from headway.contract.origin import Layer
from headway.contract.run import Ranks
from headway.errors import Code, ConfigError, Problem
from headway.launcher.plan.program import Program
from headway.settings.problems import missing_ranks
from headway.settings.table import TABLE, Settings


def why_supervised(settings: Settings, supervise: bool, task: Ranks | None = None) -> str | None:
    """Return why the launcher supervises the script; None: the script may replace it.

    Args:
        settings: resolved.
        supervise: whether the command line asks for it.
        task: this process's place, if its scheduler has started it as one of several ranks.
    """
    name = _setting_for_a_launcher(settings, is_rank=task is not None)
    if name is not None:
        return f"{name} is {settings.values[name].value}"
    return "--supervise" if supervise else None


def _setting_for_a_launcher(settings: Settings, *, is_rank: bool) -> str | None:
    for name in ("num_processes", "num_machines"):
        if settings.values[name].value > 1 and not is_rank:
            return name
    for name, row in TABLE.items():
        if row.needs_launcher and settings.values[name].value != row.default:
            return name
    return None


def is_world_of_one(settings: Settings) -> bool:
    """Return whether a script that replaces the launcher finds the variables of a rank.

    Only where the flag asks for one process. Otherwise the script is not told of a rank, since it
    may make its own processes: Lightning, for one, then takes this process for one of several.
    """
    is_by_flag = settings.origin("num_processes").layer is Layer.FLAG
    return is_by_flag and settings.num_processes == settings.num_machines == 1


def refuse_missing_ranks(settings: Settings, world_size: int) -> None:
    """Check `ranks` against the world size, which on several machines is known only after the
    rendezvous.

    Raises:
        ConfigError: `ranks` contains one that is not below `world_size`.
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
    task: Ranks | None = None,
) -> list[Problem]:
    """Return why the program cannot run in the requested way."""
    supervised = why_supervised(settings, supervise, task)
    found = []
    if in_process and supervised is not None:
        name = _setting_for_a_launcher(settings, is_rank=task is not None)
        origin = "flag --supervise" if name is None else settings.where(name)
        found.append(
            Problem(
                f"--in-process runs one process without a launcher, but {supervised}",
                f"flag --in-process; {origin}",
                "pass --num-processes 1, and remove settings that need a launcher",
                code=Code.LAUNCHER_IN_PROCESS,
                names=() if name is None else (name,),
            )
        )
    if in_process and program.kind == "program":
        found.append(
            Problem(
                f"--in-process runs Python, but {program.name} is another program",
                "flag --in-process; flag --no-python",
                "remove one of the two",
                code=Code.PROGRAM_IN_PROCESS,
            )
        )
    if supervised is not None and program.is_stream:
        found.append(
            Problem(
                f"the script {program.name!r} is read from a pipe or descriptor, which ranks under "
                f"a launcher cannot, but {supervised}",
                "the command line",
                "save the script to a file, or run one process without a launcher",
                code=Code.SCRIPT_FROM_STREAM,
            )
        )
    if supervised is not None and "-i" in python:
        found.append(
            Problem(
                "python -i shows a prompt after the script, which ranks under a launcher cannot, "
                f"but {supervised}",
                "Python's flag -i",
                "remove -i, or run one process",
                code=Code.PYTHON_PROMPT,
            )
        )
    return found
