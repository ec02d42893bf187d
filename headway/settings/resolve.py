"""Settle every setting: default < detected < user profile < project profile < environment < flag.

No exception to that order, and every value keeps its origin. Values that the user left to `auto`
are worked out from the machine, after the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.contract.run import VARIABLE as RUN_VARIABLE
from headway.errors import ConfigError, Problem, did_you_mean
from headway.machine.facts import Machine, is_on
from headway.settings.profile import Entry, read_layer
from headway.settings.profile_files import VARIABLE as PROFILE_VARIABLE
from headway.settings.profile_files import choose_profile, find_project_profile, is_there
from headway.settings.table import AUTO, TABLE, Origin, Setting, Settings, Value

LAYERS = (
    "default",
    "detected",
    "user profile",
    "project profile",
    "environment",
    "flag",
)

Layer = Mapping[str, Entry]

# a launch inside a launch: the outer run's contract is not a setting of this one
_NO_SETTINGS = (RUN_VARIABLE, PROFILE_VARIABLE)


def profile_layers(
    environ: Mapping[str, str] = os.environ, folder: str = ".", profile: str | None = None
) -> list[Layer]:
    """Return what the user's and the project's profile say, in this order, where they exist.

    Args:
        environ: read for HEADWAY_PROFILE and XDG_CONFIG_HOME.
        folder: where the search for the project's `headway.yaml` starts.
        profile: the value of --profile: which of the user's profiles, by name or path.

    Raises:
        ConfigError: they are broken (all that is wrong at once), or the user's was named and is
            not there.
    """
    user = choose_profile(profile, environ)
    if user.chosen_by:
        user.must_exist()
    project = find_project_profile(folder, trusted=user.path)
    is_project = project and os.path.realpath(user.path) == os.path.realpath(project)
    files = [(user.path, "user profile")] if is_there(user.path) and not is_project else []
    files += [(project, "project profile")] if project is not None else []
    layers: list[Layer] = []
    problems: list[Problem] = []
    for path, layer in files:
        try:
            layers.append(read_layer(path, layer))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError.of(problems)
    return layers


def overruled(layers: Sequence[Layer]) -> list[str]:
    """Return a sentence for each value of the first layer that a later one replaces."""
    return [
        f"{name} of {entry.origin} gives way to {stronger[name].origin}"
        for name, entry in (layers[0] if layers else {}).items()
        for stronger in layers[1:]
        if name in stronger and stronger[name].raw != entry.raw and name != "env"
    ]


def environment_layer(environ: Mapping[str, str] = os.environ) -> Layer:
    """Return what the HEADWAY_* variables say; one of no setting stands under its own name."""
    settings = {row.variable: name for name, row in TABLE.items()}
    return {
        settings.get(variable, variable): Entry(
            text, Origin("environment", f"environment {variable}")
        )
        for variable, text in environ.items()
        if variable.startswith("HEADWAY_") and variable not in _NO_SETTINGS
    }


def resolve(
    layers: list[Layer], machine: Machine, environ: Mapping[str, str] = os.environ
) -> Settings:
    """Return one typed value for every setting, each with its origin.

    Args:
        layers: from the weakest to the strongest, without the defaults.
        machine: what `auto` is worked out from.
        environ: read for OMP_NUM_THREADS, which beats what would be computed.

    Raises:
        ConfigError: all unknown names and impossible values at once.
    """
    settings, problems = settle(layers, machine, environ)
    if problems:
        raise ConfigError.of(problems)
    return settings


def settle(
    layers: Sequence[Layer], machine: Machine, environ: Mapping[str, str] = os.environ
) -> tuple[Settings, list[Problem]]:
    """Return what `resolve` does as far as it can be read, and what is wrong with the rest."""
    values, problems, unread = _read(layers)
    values["device"] = _without_alias(values["device"], machine)
    for name, detect in _DETECT.items():
        if values[name].value == AUTO:
            asked = values[name].origin
            value, reason = detect(Settings(values), machine, environ)
            words = f"detected: {reason}"
            if asked.layer != "default":
                words += f" (auto from {asked.words})"
            values[name] = Value(value, Origin("detected", words))
            if unread:  # it may follow from a guess
                unread.add(name)
    return Settings(values, unread), problems


def typed(layers: Sequence[Layer]) -> dict[str, Value]:
    """Return the value of every setting before anything is detected: `auto` stays `auto`.

    Raises:
        ConfigError: all unknown names and impossible values at once.
    """
    values, problems, _ = _read(layers)
    if problems:
        raise ConfigError.of(problems)
    return values


def _read(layers: Sequence[Layer]) -> tuple[dict[str, Value], list[Problem], set[str]]:
    """Return the values that can be read, what is wrong, and the settings that it concerns."""
    problems: list[Problem] = []
    unread: set[str] = set()
    default = Origin("default", "default")
    values = {name: Value(row.default, default) for name, row in TABLE.items()}
    for layer in layers:
        for name, entry in layer.items():
            problems += entry.faults
            if name not in TABLE:
                problem, meant = _unknown(name, entry.origin)
                problems.append(problem)
                unread.add(meant)
            elif entry.faults:
                unread.add(name)
            else:
                try:
                    value = TABLE[name].parse(entry.raw)
                    values[name] = _merged(values[name], Value(value, entry.origin))
                except ValueError as error:
                    problems.append(_impossible(TABLE[name], entry, str(error)))
                    unread.add(name)
    return values, problems, unread


def _merged(old: Value, new: Value) -> Value:
    """Maps (`env`) grow from layer to layer; all other values replace each other."""
    if isinstance(new.value, dict) and old.value:
        words = f"{old.origin.words}; {new.origin.words}"
        return Value({**old.value, **new.value}, Origin(new.origin.layer, words))
    return new


def _impossible(row: Setting[Any], entry: Entry, reason: str) -> Problem:
    raw = entry.raw if isinstance(entry.raw, str) else str(entry.raw)
    written = raw if len(raw) <= 60 else raw[:57] + "..."
    example = did_you_mean(raw, row.choices) or (row.choices or (row.example,))[0]
    fix = {
        "flag": f"pass `{row.flag} {example}`",
        "environment": f"`export {row.variable}={example}`, or unset it",
        "assignment": f"write {row.name}={example}",
    }.get(entry.origin.layer, f"write `{row.name}: {example}`")
    return Problem(f"{row.name} is {written!r}, {reason}", str(entry.origin), fix)


def _unknown(name: str, origin: Origin) -> tuple[Problem, str]:
    """Return what is wrong with a name of no setting, and the setting that may be meant."""
    what, known = f"{name!r} is no setting", {name: name for name in TABLE}
    if origin.layer == "environment":
        what = f"{name} is no variable of Headway"
        known = {row.variable: row.name for row in TABLE.values()} | {PROFILE_VARIABLE: ""}
    close = did_you_mean(name, known)
    problem = Problem(
        what + (f"; did you mean {close!r}?" if close else ""),
        str(origin),
        "correct the name, or remove it; `headway config set --help` lists all settings",
    )
    return problem, known.get(close or "", "")


def _without_alias(device: Value, machine: Machine) -> Value:
    """Read `gpu` as the kind of GPU that is here; where there is none, as cuda, to be refused."""
    if device.value != "gpu":
        return device
    is_mac = machine.mps or machine.system == "Darwin"  # one without MPS says why
    name = "mps" if is_mac and not machine.visible_gpus else "cuda"
    return Value(name, Origin(device.origin.layer, f"{device.origin.words} (gpu)"))


Detect = Callable[[Settings, Machine, Mapping[str, str]], tuple[object, str]]


def _detect_device(_: Settings, machine: Machine, environ: Mapping[str, str]) -> tuple[object, str]:
    # the launcher sets this one for what it starts; then it is no wish of the user's
    if RUN_VARIABLE not in environ and is_on(environ, "ACCELERATE_USE_CPU"):
        return "cpu", f"environment ACCELERATE_USE_CPU={environ['ACCELERATE_USE_CPU']}"
    return machine.best_device()


def _detect_num_processes(
    settings: Settings, machine: Machine, _: Mapping[str, str]
) -> tuple[object, str]:
    if settings.device != "cuda":
        return 1, f"one process on {settings.device}"
    visible = machine.visible_gpus
    selected = settings.devices.select(visible).indices
    if any(visible[index].slice_of for index in selected):
        return 1, "CUDA shows a process one MIG slice"
    count = settings.devices.idle or len(selected)
    return max(1, count), f"one process for each of {count} GPUs"


def _detect_mps_fallback(
    settings: Settings, _: Machine, environ: Mapping[str, str]
) -> tuple[object, str]:
    name = "PYTORCH_ENABLE_MPS_FALLBACK"
    if settings.device == "mps" and name in environ:
        return "on" if is_on(environ, name) else "strict", f"environment {name}={environ[name]}"
    return "on", "operators that MPS lacks run on the CPU"


def _detect_threads(
    settings: Settings, machine: Machine, environ: Mapping[str, str]
) -> tuple[object, str]:
    for source, variables in (("env", settings.env), ("environment", environ)):
        threads = threads_given_by(variables)
        if threads is not None:
            return threads, f"{source} OMP_NUM_THREADS={variables['OMP_NUM_THREADS']}"
    threads = max(1, machine.cores // settings.num_processes)
    return threads, f"{machine.cores_reason} / {settings.num_processes}"


def threads_given_by(variables: Mapping[str, str]) -> int | None:
    """Return what OMP_NUM_THREADS says; None without it, or where OpenMP could not obey it."""
    first = variables.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    # "4,2" is 4 threads, and 2 in a nested region
    is_number = first.isdecimal() and first.isascii() and len(first) <= 9
    return int(first) if is_number and int(first) > 0 else None


def _detect_main_port(settings: Settings, _: Machine, __: Mapping[str, str]) -> tuple[object, str]:
    if settings.num_machines > 1:
        return 29500, "torch's usual port"
    return None, "on one machine the system chooses a free port"


def _detect_start_method(
    _: Settings, machine: Machine, __: Mapping[str, str]
) -> tuple[object, str]:
    if machine.system == "Linux":
        return "fork", "one torch import for all ranks"
    return "exec", f"forking is not safe on {machine.system}"


_DETECT: Mapping[str, Detect] = {  # in the order in which they depend on each other
    "device": _detect_device,
    "num_processes": _detect_num_processes,
    "mps_fallback": _detect_mps_fallback,
    "threads_per_process": _detect_threads,
    "main_port": _detect_main_port,
    "start_method": _detect_start_method,
}
