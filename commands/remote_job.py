"""Launches on other machines: scheduler jobs and ssh hosts, and copies of the code."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import NamedTuple

from headway.commands.flags import Parsed, usage_error
from headway.errors import Code, ConfigError, MachineError
from headway.launcher.plan.program import Program
from headway.machine.facts import Machine
from headway.settings.problems import profile_problems
from headway.settings.profile import Entries
from headway.settings.setting import SET
from headway.settings.table import OF_JOBS, OF_MACHINES

SCHEDULER = "slurm"
"""The only scheduler that --submit supports."""


class RemoteJob(NamedTuple):
    """A launch that is requested here and runs elsewhere."""

    parsed: Parsed
    own: Sequence[str]  # the same flags, as typed
    program: Program  # on this machine's file system
    layers: Sequence[Entries]
    machine: Machine  # this machine, which may be unable to run the program
    environ: Mapping[str, str]


def reject_job_flags(parsed: Parsed, flags: Entries) -> None:
    """Raise if a flag requires --submit, but that is missing; profiles may contain the setting."""
    if parsed.submit is None:
        if given := [flags[name].origin.flag for name in OF_JOBS if name in flags]:
            raise usage_error(
                f"{', '.join(map(str, given))} applies only to jobs, but --submit is not set",
                fix=f"add --submit {SCHEDULER}, or remove {' and '.join(map(str, given))}",
                code=Code.FLAGS_CONTRADICT,
            )
    elif parsed.submit != SCHEDULER:
        raise ConfigError(
            f"invalid value {parsed.submit!r} for --submit: must be {SCHEDULER}",
            where="flag --submit",
            fix=f"pass --submit {SCHEDULER}",
            code=Code.BAD_VALUE,
        )


def check_everywhere(layers: Sequence[Entries], machine: Machine) -> None:
    """Validate the settings that do not depend on where the launch runs."""
    anywhere = [
        {name: entry for name, entry in layer.items() if name not in OF_MACHINES}
        for layer in layers
    ]
    if found := profile_problems(anywhere, machine):
        raise ConfigError.of(found)


def job_args(own: Sequence[str], program: Program, without: Set[str]) -> list[str]:
    """Return the arguments of `headway launch` for another machine.

    `without` names the flags to omit, and the settings to omit whether a flag or --set sets them.
    """
    flags = [word for word in own if not without & _names_in(word)]
    if program.kind == "module":  # the last flag names the module
        return [*flags, *program.args]
    dashes = ["--"] if program.name.startswith("-") else []
    return [*flags, *dashes, program.name, *program.args]


def _names_in(word: str) -> set[str]:
    flag, _, value = word.partition("=")
    setting = value.partition("=")[0] if flag == SET else flag[2:].replace("-", "_")
    return {flag, setting}


class Relocated(NamedTuple):
    """A program in a copy of the code, with the variables that make its modules importable.

    The script and its imports come from the copy. The working directory and arguments do not
    change, so that paths to data, configurations, outputs and checkpoints remain valid.
    """

    program: Program
    variables: dict[str, str]


def relocate(program: Program, folder: str, root: str, tree: str) -> Relocated:
    """Return the program with its path in `tree`, a copy of `root`; the program runs in `folder`.

    Raises:
        MachineError: this Python would search for a module in the working directory first.
    """
    there = partial(_there, folder=folder, root=root, tree=tree)
    python_path = [found for path in sys.path if path and (found := there(path))]
    variables = {}
    name = program.name
    if program.kind == "module":
        if sys.version_info < (3, 11):
            raise MachineError(
                f"module {name} cannot be run from a copy of the code: Python "
                f"{sys.version_info[0]}.{sys.version_info[1]} searches the working directory first",
                where="flag --module",
                fix="pass its file instead, pass --set snapshot=off, or use Python 3.11",
                code=Code.JOB,
            )
        variables["PYTHONSAFEPATH"] = "1"
        python_path.insert(0, there(folder) or tree)
    elif program.kind == "script" or os.sep in name:
        name = there(name) or name
    if python_path:
        before = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        variables["PYTHONPATH"] = os.pathsep.join([*dict.fromkeys(python_path), *before])
    return Relocated(program._replace(name=name), variables)


def _there(path: str, folder: str, root: str, tree: str) -> str:
    """Return the path in `tree` for a path in `root`; empty if it does not exist there."""
    whole = os.path.join(folder, path)
    for absolute in (os.path.abspath(whole), os.path.realpath(whole)):
        place = os.path.relpath(absolute, root)
        found = os.path.normpath(os.path.join(tree, place))
        if place.split(os.sep)[0] != os.pardir and os.path.exists(found):
            return found
    return ""
