"""Validation of values and profiles; `headway config validate`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from headway.commands.flags import Parser
from headway.errors import Code, ConfigError, HeadwayError, Problem
from headway.ipc.origin import Layer, Origin
from headway.launcher.plan.build import build_plan
from headway.launcher.plan.plan import LaunchPlan
from headway.launcher.plan.program import Program
from headway.machine.detection import detect_machine
from headway.machine.facts import GpuUse, Machine
from headway.settings.problems import profile_problems
from headway.settings.profile import Entries, Entry, choose_profile, read_profile, shown
from headway.settings.resolve import NOTHING, parse_layers, profiles_in_use, try_resolve
from headway.settings.setting import Raw
from headway.settings.table import TABLE

SCRIPT = "your_script.py"


def validate(argv: Sequence[str]) -> int:
    """Run `headway config validate`; return 1 if a profile is invalid."""
    parser = Parser(
        "config validate",
        "Check the given profiles, or the profiles that a launch would read. A profile may be for "
        "another machine: values that are unsupported only on this machine are not errors.",
        usage="headway config validate [--profile NAME] [FILE ...]",
    )
    parser.shared_flags("--profile")
    parsed, files = parser.parse_words(argv)
    machine = detect_machine()
    paths = files or [path for path, _ in profiles_in_use(profile=parsed.profile)]
    if not paths:
        raise ConfigError(
            "no profile to check",
            where=f"{shown(choose_profile(parsed.profile).path)}, and headway.yaml in this folder "
            "or above",
            fix="run `headway config` to write a profile, or pass a file",
            code=Code.UNREADABLE,
        )
    valid = [is_valid([path], machine) for path in paths]
    if not files and len(paths) > 1 and all(valid):  # a launch reads them together
        valid.append(is_valid(paths, machine))
    return 0 if all(valid) else 1


def is_valid(paths: Sequence[str], machine: Machine) -> bool:
    """Print the combined profiles' machine-independent problems, or `ok` if there are none."""
    try:
        found = profile_problems([read_profile(path, Layer.PROFILE) for path in paths], machine)
    except HeadwayError as error:
        found = error.problems
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    if not found:
        print(f"{' with '.join(map(shown, paths))}: ok")
    return not found


def plan_for(
    layers: Sequence[Entries],
    machine: Machine,
    environ: Mapping[str, str] = MappingProxyType({}),
    cluster: Entries = NOTHING,
) -> LaunchPlan:
    machine = with_idle_gpus(machine)
    settings, invalid = try_resolve(layers, machine, environ, cluster)
    program, python = Program(SCRIPT), ["python"]
    return build_plan(settings, machine, program, python=python, environ=environ, problems=invalid)


def launch_problems(
    layers: Sequence[Entries],
    machine: Machine,
    environ: Mapping[str, str] = MappingProxyType({}),
    cluster: Entries = NOTHING,
) -> Sequence[Problem]:
    try:
        plan_for(layers, machine, environ, cluster)
    except HeadwayError as error:
        return error.problems
    return []


def with_idle_gpus(machine: Machine) -> Machine:
    """Return the machine with all GPUs marked idle, because GPU usage is checked only at launch."""
    return machine._replace(
        gpus=tuple(gpu._replace(use=GpuUse(0, 0, ()), claimed_by="") for gpu in machine.gpus)
    )


def assignments(words: Sequence[str], origin: Origin) -> dict[str, Raw]:
    """Parse assignments such as `num_processes=2`; raise all errors at once."""
    found: list[tuple[str, str, str]] = []  # what, fix and code
    values: dict[str, Raw] = {}
    for word in words:
        key, equals, raw = word.partition("=")
        if any("\ud800" <= char <= "\udfff" for char in word):  # undecodable bytes
            found.append((f"{word!r} is not UTF-8", "write it as text", Code.BAD_VALUE))
        elif not equals:
            name = word if word.partition(".")[0] in TABLE else "KEY"
            found.append((f"{word!r} is not KEY=VALUE", f"write {name}=VALUE", Code.BAD_VALUE))
        elif key in values:
            found.append((f"{key} is set twice", "remove one of them", Code.DUPLICATE_KEY))
        if equals:
            values[key] = raw
    if "env" in values:
        twice, fix = "is set twice, because env sets all variables", "remove one of them"
        others = [key for key in values if key.startswith("env.")]
        found += [(f"{key} {twice}", fix, Code.DUPLICATE_KEY) for key in others]
    problems = [Problem(what, str(origin), fix, code) for what, fix, code in found]
    return checked_values({key: Entry(raw, origin) for key, raw in values.items()}, problems)


def checked_values(
    entries: Mapping[str, Entry], problems: Sequence[Problem] = ()
) -> dict[str, Raw]:
    """Return the canonical values; raise `problems`, together with any problems in the values."""
    try:
        parse_layers(layers_of(entries))
    except ConfigError as error:
        problems = [*problems, *error.problems]
    if problems:
        raise ConfigError.of(problems)
    return {
        key: TABLE[key].canonical(entry.raw) if key in TABLE else entry.raw
        for key, entry in entries.items()
    }


def layers_of(entries: Mapping[str, Entry]) -> list[Entries]:
    """Return a layer for each of `entries`; `env.NAME` sets a single variable."""
    layers: list[Entries] = []
    for key, entry in entries.items():
        name, _, item = key.partition(".")
        is_variable = name == "env" and item
        layers.append(
            {name: entry._replace(raw={item: str(entry.raw)})} if is_variable else {key: entry}
        )
    return layers
