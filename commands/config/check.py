"""What is wrong with a profile, whatever machine it is for; `headway config validate`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from headway.commands.flags import Parser
from headway.contract.origin import Layer, Origin
from headway.errors import ConfigError, HeadwayError, Problem
from headway.launcher.planning.plan import LaunchPlan, build_plan
from headway.launcher.planning.program import Program
from headway.machine.detection import detect_machine
from headway.machine.facts import GpuUse, Machine
from headway.settings.problems import problems
from headway.settings.profile import Entries, Entry, parse_layer, read_layer
from headway.settings.profile_files import choose_profile, find_project_profile, is_there, shown
from headway.settings.resolve import NOTHING, settle
from headway.settings.table import AUTO

SCRIPT = "your_script.py"


def validate(argv: Sequence[str]) -> int:
    """Check the named files, or those that a launch here would read; 1 where one is wrong."""
    parser = Parser(
        "config validate",
        "Check profiles: the files named, or those that a launch here would read. "
        "What only this machine cannot do is no mistake of a profile.",
        usage="headway config validate [--profile NAME] [FILE ...]",
    )
    parser.profile_flag()
    parsed, files = parser.parse_words(argv)
    machine = detect_machine()
    in_use = [] if files else _files_in_use(parsed.profile)
    sound = [_is_sound([path], machine) for path in files or in_use]
    if len(in_use) > 1 and all(sound):  # each alone; but a launch takes them together
        sound.append(_is_sound(in_use, machine))
    return 0 if all(sound) else 1


def _files_in_use(profile: str | None) -> list[str]:
    chosen = choose_profile(profile)
    if chosen.chosen_by:
        chosen.must_exist()
    project = find_project_profile(trusted=chosen.path)
    named = {os.path.realpath(path): path for path in (chosen.path, project) if path}
    files = [path for path in named.values() if is_there(path)]
    if not files:
        raise ConfigError(
            "there is no profile to check",
            where=f"{shown(chosen.path)}, and no headway.yaml from here upward",
            fix="`headway config` writes one; or name a file",
        )
    return files


def _is_sound(paths: Sequence[str], machine: Machine) -> bool:
    """Print what is wrong with these profiles together, or that nothing is."""
    try:
        found = mistakes([read_layer(path, Layer.PROFILE) for path in paths], machine)
    except HeadwayError as error:
        found = error.problems
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    if not found:
        print(f"{' with '.join(map(shown, paths))}: ok")
    return not found


def mistakes(layers: Sequence[Entries], machine: Machine) -> Sequence[Problem]:
    """Return what is wrong with these profiles together on every machine.

    Args:
        layers: from the weakest to the strongest.
        machine: for what is left to detection, which is then in nobody's way.
    """
    devices = [str(layer["device"].raw) for layer in layers if "device" in layer]
    if not devices or devices[-1].strip().lower() in (AUTO, "gpu"):  # most is possible on CUDA
        gpus = Origin(Layer.DEFAULT, reason="a machine with GPUs")
        layers = [*layers, {"device": Entry("cuda", gpus)}]
    settings, unread = settle(layers, machine, {})
    return [*unread, *problems(settings)]


def checked(
    text: str, path: str, machine: Machine, origins: Mapping[str, Origin] = MappingProxyType({})
) -> Mapping[str, Entry]:
    """Return the entries of a profile's text.

    Args:
        text: of the profile.
        path: of the file that it stands in, or will.
        machine: this one, for what is left to detection.
        origins: of the values that come from elsewhere.

    Raises:
        ConfigError: anything that is wrong with it on every machine.
    """
    entries = parse_layer(text, path, Layer.PROFILE)
    for name in origins.keys() & entries.keys():
        entries[name] = entries[name]._replace(origin=origins[name])
    if found := mistakes([entries], machine):
        raise ConfigError.of(found)
    return entries


def plan_for(
    layers: Sequence[Entries],
    machine: Machine,
    environ: Mapping[str, str] = MappingProxyType({}),
    cluster: Entries = NOTHING,
) -> LaunchPlan:
    """Return the plan of a launch under these layers alone.

    Raises:
        ConfigError: they contradict each other.
        MachineError: `machine` cannot do what they ask.
    """
    machine = at_rest(machine)
    settings, unread = settle(layers, machine, environ, cluster)
    return build_plan(
        settings,
        machine,
        Program(SCRIPT),
        python=["python"],
        environ=environ,
        problems=unread,
    )


def refusals(
    layers: Sequence[Entries],
    machine: Machine,
    environ: Mapping[str, str] = MappingProxyType({}),
    cluster: Entries = NOTHING,
) -> Sequence[Problem]:
    """Return what a launch under these layers alone would refuse."""
    try:
        plan_for(layers, machine, environ, cluster)
    except HeadwayError as error:
        return error.problems
    return []


def at_rest(machine: Machine) -> Machine:
    """Return the machine with GPUs that nobody uses; which are idle, a launch finds out."""
    rest: dict[str, Any] = {"use": GpuUse(0, 0, ()), "claimed_by": ""}
    gpus = (
        gpu._replace(slices=tuple(part._replace(**rest) for part in gpu.slices), **rest)
        for gpu in machine.gpus
    )
    return machine._replace(gpus=tuple(gpus))
