"""A program as another tree of the same code has it: a snapshot of a job, or a run's commit.

The working folder stays: data, outputs and checkpoints are where they were. The script, what it
imports, and files of the code that arguments name are those of the tree.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from headway.errors import MachineError
from headway.launcher.plan.program import Program


class Moved(NamedTuple):
    """A program in another tree, and the variables that let Python find its modules there."""

    program: Program
    variables: dict[str, str]


def moved(
    program: Program, folder: str, root: str, tree: str, has: Callable[[str], bool] | None = None
) -> Moved:
    """Return a program, typed in `folder`, as it is in `tree`, a copy of the code in `root`.

    `has` says whether a path from there is in a copy that is yet to be made.

    Raises:
        MachineError: this Python would look for a module in the working folder first.
    """
    has = has or (lambda place: os.path.exists(os.path.join(tree, place)))
    there = partial(_there, folder=folder, root=root, tree=tree, has=has)
    args = tuple(_argument(word, folder, there) for word in program.args)
    python_path = [found for one in sys.path if one and (found := there(one))]
    variables = {}
    name = program.name
    if program.kind == "module":
        if sys.version_info < (3, 11):
            raise MachineError(
                f"the module {name} cannot be run from another folder than this one: Python "
                f"{sys.version_info[0]}.{sys.version_info[1]} looks for it here first",
                where="flag --module",
                fix="name its file instead, pass --snapshot off, or use Python 3.11",
            )
        variables["PYTHONSAFEPATH"] = "1"
        python_path.insert(0, there(folder) or tree)
    elif program.kind == "script" or os.sep in name:
        name = there(name) or name
    if python_path:
        before = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        variables["PYTHONPATH"] = os.pathsep.join([*dict.fromkeys(python_path), *before])
    return Moved(program._replace(name=name, args=args), variables)


def _there(path: str, folder: str, root: str, tree: str, has: Callable[[str], bool]) -> str:
    """Return the place of a path of `root` in `tree`; empty for one that is not there."""
    whole = os.path.join(folder, path)
    for one in (os.path.abspath(whole), os.path.realpath(whole)):
        place = os.path.relpath(one, root)
        if place.split(os.sep)[0] != os.pardir and has(place):
            return os.path.normpath(os.path.join(tree, place))
    return ""


def _argument(word: str, folder: str, there: Callable[[str], str]) -> str:
    """Return an argument, with the file of the code that it names as it is in the tree."""
    flag, equals, value = word.rpartition("=") if word.startswith("-") else ("", "", word)
    if not value or os.path.isdir(os.path.join(folder, value)):
        return word
    return f"{flag}{equals}{there(value) or value}"
