"""The rooms keep to their doors: who imports whom, who imports torch, who touches os.environ.

rooms.txt has a row for each room: its files and folders, where its name does not say them, and the
rooms that it imports from, all of which stand above it.

python -m tests.architecture.test_rooms     writes the right-hand side of the rows anew
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture.tree import (
    ROOT,
    declared_packages,
    folder_of,
    imported_modules,
    product_files,
    tracked_product_files,
)

ROWS = Path(__file__).with_name("rooms.txt")
NOTHING = "-"

RUNTIME = (
    "devices",  # in methods, which the launch path does not call
    "distributed",
    "memory",
    "data",
    "training",
    "precision",
    "strategies",
    "checkpoint",
    "trackers",
    "checkpointer",
    "accelerator",
    "compat",
    "integrations",
    "estimate.child",
)
TORCH = {*RUNTIME, "launcher.processes", "launcher.multinode", "launcher.rank"}
"""The rooms that may import torch."""

READ_ENVIRON = {
    # what a setting, the launcher or the machine says
    *("settings.resolve", "ipc.run_contract", "ipc.numbering"),
    "machine.detection",
    # a record, and a profile, lie below a folder that a variable names
    *("ipc.paths", "history.store", "history.process_record"),
    "commands.remote_job",  # PYTHONPATH of a snapshot of the code
    # profiles lie below a folder that a variable names; a subcommand hands the environment on
    *("settings.profile", "commands.launch", "commands.config.show", "commands.doctor"),
    *("commands.env", "commands.exchange.export_settings"),
    "commands.config.ask",  # TERM
    # a forked rank gets its own variables, a script in this process those of the plan
    *("launcher.processes.server", "launcher.run"),
    "commands.host_agent",  # what sshd says, and what the caller hands on to the launch there
    "trackers.adapters",  # variables that stand for its arguments
    "launcher.processes.starter",  # those of other processes
    "commands.estimate",  # the script's own, for its attempts
    "estimate.child.script_patches",  # those of a rank, in an attempt's process
    "estimate.child.confinement",  # where temporary files go there
    "distributed.process",  # what the script asks for, or sets for a while
    "launcher.rank.import_hooks",  # what the script changes in its own
}

ENVIRON = ("environ", "getenv", "putenv")  # attributes of os

FILES = product_files()


def rows() -> dict[str, list[str]]:
    """Return the members of each room, in their order; a root file is a member itself."""
    members = {}
    for line in ROWS.read_text().splitlines():
        name, _, listed = line.partition("<-")[0].partition(":")
        members[name.strip()] = listed.split() or [name.strip()]
    return members


MEMBERS = rows()


def room_of(module: str) -> str:
    """Return the room of a module of ours: the one with the longest member that it lies in."""
    inside = module.removeprefix("headway").removeprefix(".")
    if not inside:
        return "headway"
    homes = {
        member: room
        for room, members in MEMBERS.items()
        for member in members
        if inside == member or inside.startswith(f"{member}.")
    }
    assert homes, f"{module} is in no room of {ROWS.name}"
    return homes[max(homes, key=len)]


def arrows() -> dict[str, set[str]]:
    """Return the rooms that each room imports from."""
    found: dict[str, set[str]] = {room: set() for room in MEMBERS}
    for module, path in FILES.items():
        for other in imported_modules(path, FILES):
            if other in FILES:
                found[room_of(module)].add(room_of(other))
    return {room: others - {room} for room, others in found.items()}


def picture() -> str:
    """Return the rows with the arrows that there are."""
    order = list(MEMBERS)
    found = arrows()
    lines = []
    for room, members in MEMBERS.items():
        left = room if members == [room] else f"{room}: {' '.join(members)}"
        right = " ".join(sorted(found[room], key=order.index)) or NOTHING
        lines.append(f"{left} <- {right}")
    return "\n".join(lines) + "\n"


def test_the_rooms_and_their_arrows_are_those_that_are_written_down() -> None:
    assert ROWS.read_text() == picture(), "python -m tests.architecture.test_rooms writes them anew"


def test_no_room_imports_from_a_later_one() -> None:
    order = list(MEMBERS)
    for room, others in arrows().items():
        later = [other for other in others if order.index(other) > order.index(room)]
        assert not later, f"{room} imports from {later}, which stands below it"


def test_no_file_is_in_a_cycle_of_imports() -> None:
    unseen = {
        name: {other for other in imported_modules(path, FILES) if other in FILES}
        for name, path in FILES.items()
        if path.stem != "__init__"
    }
    while leaves := [name for name, others in unseen.items() if not others & unseen.keys()]:
        for name in leaves:
            del unseen[name]
    assert not unseen, f"these import each other: {sorted(unseen)}"


def test_torch_is_met_in_few_rooms() -> None:
    for module, path in FILES.items():
        if any(name.split(".")[0] == "torch" for name in imported_modules(path, FILES)):
            assert room_of(module) in TORCH, f"{module} imports torch"


def test_the_environment_is_met_in_few_modules() -> None:
    for module, path in FILES.items():
        if module.removeprefix("headway.") in READ_ENVIRON:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                where = f"{path}, line {node.lineno}"
                assert node.attr not in ENVIRON, f"{where}, touches os.{node.attr}"


@pytest.mark.processes
def test_every_tracked_file_is_in_a_declared_package_and_every_package_has_files() -> None:
    assert set(FILES.values()) == tracked_product_files()
    for package in declared_packages():
        assert (folder_of(package) / "__init__.py") in FILES.values(), package


def test_the_lists_above_name_rooms_and_modules_that_exist() -> None:
    assert MEMBERS.keys() >= TORCH
    assert {f"headway.{name}" for name in READ_ENVIRON} <= FILES.keys()


if __name__ == "__main__":
    ROWS.write_text(picture())
    print(ROWS.relative_to(ROOT))
