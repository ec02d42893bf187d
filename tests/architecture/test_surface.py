"""The public surface is frozen in surface.txt: changing it is a visible diff.

python -m tests.architecture.test_surface     writes the file anew, from the root of the repository
"""

from __future__ import annotations

import ast
import re
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import headway
from headway.commands.config import SUBCOMMANDS
from headway.commands.explain import read_pages
from headway.commands.main import COMMANDS, main
from headway.settings.profile import VARIABLE
from headway.settings.table import TABLE

FILE = Path(__file__).with_name("surface.txt")
PACKAGE = Path(__file__).resolve().parents[2] / "headway"


def public_members(file: str, name: str) -> list[str]:
    """Return the public methods and properties of a class, read from its source without torch."""
    for node in ast.parse((PACKAGE / file).read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            found = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            assigned = (item.targets for item in node.body if isinstance(item, ast.Assign))
            found |= {to.id for targets in assigned for to in targets if isinstance(to, ast.Name)}
            return sorted(member for member in found if not member.startswith("_"))
    raise AssertionError(f"{file} has no class {name}")


def public_names(file: str) -> list[str]:
    """Return the names that a module imports for others, read from its source without torch."""
    names = []
    for node in ast.parse((PACKAGE / file).read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            found = [alias.name for alias in node.names]
            names += functions_of(node.module) if found == ["*"] else found
    return names


def functions_of(module: str | None) -> list[str]:
    """Return the public functions that a module defines, or has another one make."""
    names: list[str] = []
    source = PACKAGE.parent.joinpath(*str(module).split(".")).with_suffix(".py")
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [to.id for to in node.targets if isinstance(to, ast.Name)]
    return [name for name in names if not name.startswith("_")]


def flags_of(command: str) -> list[str]:
    """Return the flags that a command's --help lists."""
    with redirect_stdout(StringIO()) as said, suppress(SystemExit):
        main([*command.split(), "--help"])
    return sorted(
        set(re.findall(r"^ +(?:-\w(?: \w+)?, )?(--[a-z-]+)", said.getvalue(), re.MULTILINE))
    )


def surface() -> str:
    """Return all that users may lean on, a line each."""
    lines = [f"headway.{name}" for name in headway.__all__]
    process = public_members("distributed/process.py", "Process")
    own = sorted({*public_members("accelerator.py", "Accelerator"), *process})
    lines += [f"Accelerator.{name}" for name in own]
    for name in ("PartialState", "AcceleratorState", "GradientState"):
        lines += [f"{name}.{member}" for member in public_members("state.py", name)]
    lines += [f"PartialState.{member}" for member in process]
    lines += sorted(f"headway.utils.{name}" for name in public_names("utils.py"))
    commands = [*COMMANDS, *(f"config {name}" for name in SUBCOMMANDS)]
    for command in sorted(commands):
        lines += [f"headway {command}"]
        lines += [f"headway {command} {flag}" for flag in flags_of(command)]
    lines += [f"error {id}" for id in read_pages()]
    lines += [f"profile {name}" for name in TABLE]
    lines += [f"environment {row.variable}" for row in TABLE.values()]
    lines += [f"environment {VARIABLE}"]
    return "\n".join(lines) + "\n"


def test_the_public_surface_is_the_one_written_down() -> None:
    assert surface() == FILE.read_text()


if __name__ == "__main__":
    FILE.write_text(surface())
