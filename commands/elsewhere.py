"""What launches elsewhere have in common: as a job of a scheduler, of a snapshot of the code there,
or on hosts over ssh.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import NamedTuple

from headway.commands.flags import Parsed, bad_words
from headway.errors import ConfigError, MachineError
from headway.launcher.plan.program import Program
from headway.machine.facts import Machine
from headway.settings.problems import profile_problems
from headway.settings.profile import Entries
from headway.settings.setting import SET
from headway.settings.table import OF_JOBS, OF_MACHINES

SCHEDULER = "slurm"
"""The only one that --submit knows."""


class RemoteJob(NamedTuple):
    """A launch that is typed here, and runs elsewhere."""

    parsed: Parsed
    own: Sequence[str]  # the same flags as words
    program: Program  # on this machine's file system
    layers: Sequence[Entries]
    machine: Machine  # this one, which need not be able to run the program
    environ: Mapping[str, str]


def reject_job_flags(parsed: Parsed, flags: Entries) -> None:
    """Without --submit, refuse flags that only apply to jobs; a profile may hold them for jobs."""
    if parsed.submit is None:
        if given := [flags[name].origin.flag for name in OF_JOBS if name in flags]:
            raise bad_words(
                f"{', '.join(map(str, given))} is for jobs of a scheduler, and this launch is none",
                fix=f"add --submit {SCHEDULER}, or leave it out",
            )
    elif parsed.submit != SCHEDULER:
        raise ConfigError(
            f"--submit is {parsed.submit!r}, but it must be {SCHEDULER}",
            where="flag --submit",
            fix=f"pass --submit {SCHEDULER}",
        )


def check_everywhere(layers: Sequence[Entries], machine: Machine) -> None:
    """Check the settings that do not depend on where the launch runs."""
    anywhere = [
        {name: entry for name, entry in layer.items() if name not in OF_MACHINES}
        for layer in layers
    ]
    if found := profile_problems(anywhere, machine):
        raise ConfigError.of(found)


def remote_args(own: Sequence[str], program: Program, without: Set[str]) -> list[str]:
    """Return the words after `headway launch` for another machine.

    `without` are the flags for this machine; settings, which --set may set, are given by name.
    """
    flags = [word for word in own if not without & _names_in(word)]
    if program.kind == "module":  # the last of the flags names it
        return [*flags, *program.args]
    dashes = ["--"] if program.name.startswith("-") else []
    return [*flags, *dashes, program.name, *program.args]


def _names_in(word: str) -> set[str]:
    flag, _, value = word.partition("=")
    setting = value.partition("=")[0] if flag == SET else flag[2:].replace("-", "_")
    return {flag, setting}


class Moved(NamedTuple):
    """A program in another tree, and the variables that let Python find its modules there.

    The rule: the script and what it imports are those of the tree; the working folder and the
    arguments stay, so that data, configurations, outputs and checkpoints are where they were.
    """

    program: Program
    variables: dict[str, str]


def moved(program: Program, folder: str, root: str, tree: str) -> Moved:
    """Return a program, typed in `folder`, as it is in `tree`, a copy of the code in `root`.

    Raises:
        MachineError: this Python would look for a module in the working folder first.
    """
    there = partial(_there, folder=folder, root=root, tree=tree)
    python_path = [found for path in sys.path if path and (found := there(path))]
    variables = {}
    name = program.name
    if program.kind == "module":
        if sys.version_info < (3, 11):
            raise MachineError(
                f"the module {name} cannot be run from another folder than this one: Python "
                f"{sys.version_info[0]}.{sys.version_info[1]} looks for it here first",
                where="flag --module",
                fix="name its file instead, pass --set snapshot=off, or use Python 3.11",
            )
        variables["PYTHONSAFEPATH"] = "1"
        python_path.insert(0, there(folder) or tree)
    elif program.kind == "script" or os.sep in name:
        name = there(name) or name
    if python_path:
        before = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        variables["PYTHONPATH"] = os.pathsep.join([*dict.fromkeys(python_path), *before])
    return Moved(program._replace(name=name), variables)


def _there(path: str, folder: str, root: str, tree: str) -> str:
    """Return the place of a path of `root` in `tree`; empty for one that is not there."""
    whole = os.path.join(folder, path)
    for absolute in (os.path.abspath(whole), os.path.realpath(whole)):
        place = os.path.relpath(absolute, root)
        found = os.path.normpath(os.path.join(tree, place))
        if place.split(os.sep)[0] != os.pardir and os.path.exists(found):
            return found
    return ""
