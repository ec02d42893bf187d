"""The rooms keep to their doors: who imports whom, who imports torch, who touches os.environ."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = {"_version", "errors", "settings", "devices", "resolve", "contract", "status", "machine"}
CORE |= {"profile", "profile_files", "profile_edit", "regroup"}
# how a machine is looked at
CORE |= {"detection", "source", "cgroups", "gpus", "apple", "host", "snapshot", "diagnosis"}
LINKS = ("launcher", "commands", "config_wizard")
MAY_IMPORT = {
    "core": {"core"},
    "runtime": {"core", "runtime"},
    "launcher": {"core", "launcher"},
    "config_wizard": {"core", "config_wizard"},
    "commands": {"core", "launcher", "config_wizard", "commands"},
    "face": {"core", "runtime", "face", "commands"},  # __init__ and __main__
}
IMPORT_TORCH = {
    "launcher/agent.py",
    "launcher/debugging.py",
    "launcher/ranks.py",
    "launcher/rendezvous.py",
    "launcher/server.py",
}
READ_ENVIRON = {"headway/resolve.py", "headway/contract.py", "headway/detection.py"}
# profiles lie below a folder that a variable names; a subcommand hands the environment on
READ_ENVIRON |= {"headway/profile_files.py", "commands/launch.py", "commands/config_show.py"}
READ_ENVIRON |= {"commands/doctor.py", "commands/env.py", "commands/config_export.py"}
READ_ENVIRON |= {"commands/config_draft.py", "commands/config_ask.py"}  # EDITOR; TERM
READ_ENVIRON |= {"commands/config_facts.py"}
# a forked rank gets its own variables, a script in this process those of the plan
READ_ENVIRON |= {"launcher/server.py", "launcher/run.py"}
READ_ENVIRON |= {"launcher/preloaded.py"}  # what the script changes in its own

FILES = [path for folder in ("headway", *LINKS) for path in sorted((ROOT / folder).glob("*.py"))]


def room_of_module(module: str) -> str:
    parts = module.split(".")
    if len(parts) == 1:
        return "face"
    if parts[1] in LINKS:
        return parts[1]
    return "core" if parts[1] in CORE else "runtime"


def room_of_file(path: Path) -> str:
    if path.parent.name != "headway":
        return path.parent.name
    return (
        "face" if path.stem in ("__init__", "__main__") else room_of_module(f"headway.{path.stem}")
    )


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module in ("headway", "headway.launcher", "headway.commands"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_keeps_to_its_rooms_doors(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    tree = ast.parse(path.read_text())
    room = room_of_file(path)
    for module in imported(tree):
        top = module.split(".")[0]
        if top == "headway":
            assert room_of_module(module) in MAY_IMPORT[room], f"{name} imports {module}"
        if top == "torch":
            assert room == "runtime" or name in IMPORT_TORCH, f"{name} imports torch"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
            assert name in READ_ENVIRON, f"{name}, line {node.lineno}, touches os.{node.attr}"


def test_the_doors_are_watched_at_all() -> None:
    assert len(FILES) > 20
    assert {room_of_file(path) for path in FILES} == MAY_IMPORT.keys()
