"""The problems of a profile on any machine; `headway config validate`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from headway.commands.flags import Parser
from headway.contract.origin import Layer, Origin
from headway.errors import ConfigError, HeadwayError, Problem
from headway.launcher.planning.plan import LaunchPlan, build_plan
from headway.launcher.planning.program import Program
from headway.machine.detection import detect_machine
from headway.machine.facts import GpuUse, Machine
from headway.settings.layers import read_found
from headway.settings.problems import profile_problems
from headway.settings.profile import Entries, Entry, parse_profile, read_profile
from headway.settings.profile_files import choose_profile, find_project_profile, is_there, shown
from headway.settings.resolve import NOTHING, try_resolve

SCRIPT = "your_script.py"
Reader = Callable[[str, Layer], Entries]  # of a file that was named, or found


def validate(argv: Sequence[str]) -> int:
    """Check the named files, or those that a launch here would read; return 1 if one is invalid."""
    parser = Parser(
        "config validate",
        "Check profiles: the files named, or those that a launch here would read. A profile may be "
        "for another machine: what only this machine cannot run is not an error.",
        usage="headway config validate [--profile NAME] [FILE ...]",
    )
    parser.profile_flag()
    parsed, files = parser.parse_words(argv)
    machine = detect_machine()
    readers = dict.fromkeys(files, read_profile) if files else _files_in_use(parsed.profile)
    valid = [_is_valid({path: read}, machine) for path, read in readers.items()]
    if not files and len(readers) > 1 and all(valid):  # a launch reads them together
        valid.append(_is_valid(readers, machine))
    return 0 if all(valid) else 1


def _files_in_use(profile: str | None) -> dict[str, Reader]:
    chosen = choose_profile(profile)
    if chosen.chosen_by:
        chosen.must_exist()
    project = find_project_profile(trusted=chosen.path)
    readers: dict[str, Reader] = {chosen.path: read_profile} if is_there(chosen.path) else {}
    if project and os.path.realpath(project) not in map(os.path.realpath, readers):
        readers[project] = read_found
    if not readers:
        raise ConfigError(
            "no profile to check",
            where=f"{shown(chosen.path)}, and no headway.yaml from here upward",
            fix="`headway config` writes one; or pass a file",
        )
    return readers


def _is_valid(readers: Mapping[str, Reader], machine: Machine) -> bool:
    """Print the problems of these profiles together, or that there are none."""
    try:
        found = profile_problems(
            [read(path, Layer.PROFILE) for path, read in readers.items()], machine
        )
    except HeadwayError as error:
        found = error.problems
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    if not found:
        print(f"{' with '.join(map(shown, readers))}: ok")
    return not found


def checked(
    text: str, path: str, machine: Machine, origins: Mapping[str, Origin] = MappingProxyType({})
) -> Mapping[str, Entry]:
    """Return the entries of a profile's text.

    Args:
        text: of the profile.
        path: of its file, for messages.
        machine: supplies the values that are detected.
        origins: of values that are not from this file.

    Raises:
        ConfigError: all problems that it has on every machine.
    """
    entries = parse_profile(text, path, Layer.PROFILE)
    for name in origins.keys() & entries.keys():
        entries[name] = entries[name]._replace(origin=origins[name])
    if found := profile_problems([entries], machine):
        raise ConfigError.of(found)
    return entries


def plan_for(
    layers: Sequence[Entries],
    machine: Machine,
    environ: Mapping[str, str] = MappingProxyType({}),
    cluster: Entries = NOTHING,
) -> LaunchPlan:
    """Return the plan of a launch with only these layers.

    Raises:
        ConfigError: they contradict each other.
        MachineError: `machine` cannot run it.
    """
    machine = with_idle_gpus(machine)
    settings, unread = try_resolve(layers, machine, environ, cluster)
    return build_plan(
        settings,
        machine,
        Program(SCRIPT),
        python=["python"],
        environ=environ,
        problems=unread,
    )


def launch_problems(
    layers: Sequence[Entries],
    machine: Machine,
    environ: Mapping[str, str] = MappingProxyType({}),
    cluster: Entries = NOTHING,
) -> Sequence[Problem]:
    """Return the problems of a launch with only these layers."""
    try:
        plan_for(layers, machine, environ, cluster)
    except HeadwayError as error:
        return error.problems
    return []


def with_idle_gpus(machine: Machine) -> Machine:
    """Return the machine with all GPUs idle; which are busy is for a launch to find out."""
    idle: dict[str, Any] = {"use": GpuUse(0, 0, ()), "claimed_by": ""}
    gpus = (
        gpu._replace(slices=tuple(part._replace(**idle) for part in gpu.slices), **idle)
        for gpu in machine.gpus
    )
    return machine._replace(gpus=tuple(gpus))
