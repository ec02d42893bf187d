"""The public surface is frozen in surface.txt: changing it is a visible diff.

python -m tests.core.test_surface     writes the file anew, from the root of the repository
"""

from __future__ import annotations

import ast
from pathlib import Path

import headway
from headway.commands import config_ask
from headway.commands.config import SUBCOMMANDS
from headway.commands.launch import make_parser
from headway.commands.main import COMMANDS
from headway.profile import VARIABLE
from headway.settings import TABLE

FILE = Path(__file__).with_name("surface.txt")
PACKAGE = Path(__file__).resolve().parents[2] / "headway"


def public_members(file: str, name: str) -> list[str]:
    """Return the public methods and properties of a class, read from its source without torch."""
    for node in ast.parse((PACKAGE / file).read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            found = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            return sorted(member for member in found if not member.startswith("_"))
    raise AssertionError(f"{file} has no class {name}")


def surface() -> str:
    """Return all that users may lean on, a line each."""
    lines = [f"headway.{name}" for name in headway.__all__]
    members = public_members("accelerator.py", "Accelerator") + public_members(
        "process.py", "Process"
    )
    lines += [f"Accelerator.{name}" for name in sorted(members)]
    utils = ast.parse((PACKAGE / "utils.py").read_text())
    names = [a for node in utils.body if isinstance(node, ast.ImportFrom) for a in node.names]
    lines += sorted(f"headway.utils.{a.name}" for a in names if a.name != "annotations")
    lines += [f"headway {command}" for command in COMMANDS]
    lines += sorted(f"headway launch {flag}" for flag in make_parser().known)
    lines += sorted(f"headway config {flag}" for flag in config_ask.make_parser().known)
    lines += [f"headway config {name}" for name in SUBCOMMANDS]
    lines += [f"profile {name}" for name in TABLE]
    lines += [f"environment {row.variable}" for row in TABLE.values()]
    lines += [f"environment {VARIABLE}"]
    return "\n".join(lines) + "\n"


def test_the_public_surface_is_the_one_written_down() -> None:
    assert surface() == FILE.read_text()


if __name__ == "__main__":
    FILE.write_text(surface())
