"""The layers of settings, one per source, their merging, and the resolution of `auto`.

Precedence: default < detected < cluster < profiles < environment < flag. Each value keeps its
origin. Settings that are `auto` are resolved last, from the cluster's variables or by detection on
this machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from headway.devices.table import MPS, kind_of
from headway.errors import Code, ConfigError, Problem, did_you_mean
from headway.ipc.choices import DDP
from headway.ipc.origin import DEFAULT, Layer, Origin
from headway.ipc.run_contract import (
    ACCELERATE,
    ALLOCATION_VARIABLE,
    CODE_VARIABLE,
    KEY_VARIABLE,
    LOG_LEVELS,
    RECORD_VARIABLE,
    YES,
)
from headway.ipc.run_contract import VARIABLE as RUN_VARIABLE
from headway.machine.facts import Machine
from headway.settings.profile import VARIABLE as PROFILE_VARIABLE
from headway.settings.profile import (
    Entries,
    Entry,
    exists,
    find_project_profile,
    read_profile,
    trusted_profile,
)
from headway.settings.setting import AUTO, VARIABLE_PREFIX, Machines, Setting, Value
from headway.settings.table import NO_CLUSTER, TABLE, Settings

_NO = ("", "0", "false", "f", "no", "n", "off")

NOTHING: Entries = MappingProxyType({})
"""The empty layer."""

_DEFAULTS = {name: Value(row.default, DEFAULT) for name, row in TABLE.items()}

# not settings; in a nested launch, the outer launch set these variables
_NOT_SETTINGS = (
    *(RUN_VARIABLE, RECORD_VARIABLE, CODE_VARIABLE, ALLOCATION_VARIABLE, KEY_VARIABLE),
    PROFILE_VARIABLE,
    *LOG_LEVELS,
)

_HOST = "_SERVICE_HOST"
_OF_SERVICES = ("_SERVICE_", "_PORT")


def profiles_in_use(
    environ: Mapping[str, str] = os.environ, *, profile: str | None = None
) -> list[tuple[str, Layer]]:
    """Return the paths of the existing user and project profiles, in this order.

    `profile`, the value of --profile, selects the user profile by name or path.
    """
    user = trusted_profile(profile, environ)
    if user.chosen_by:
        user.must_exist()
    project = find_project_profile(trusted=user.path)
    if project is not None and os.path.realpath(user.path) == os.path.realpath(project):
        return [(project, Layer.PROJECT_PROFILE)]
    found = []
    if exists(user.path):
        found.append((user.path, Layer.USER_PROFILE))
    if project is not None:
        found.append((project, Layer.PROJECT_PROFILE))
    return found


def profile_layers(
    environ: Mapping[str, str] = os.environ, *, profile: str | None = None
) -> list[Entries]:
    """Return the layers of `profiles_in_use`; raise a ConfigError with all of their problems."""
    layers: list[Entries] = []
    problems: list[Problem] = []
    for path, layer in profiles_in_use(environ, profile=profile):
        try:
            layers.append(read_profile(path, layer))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError.of(problems)
    return layers


def launch_layers(
    profiles: Sequence[Entries], environ: Mapping[str, str], flags: Entries = NOTHING
) -> list[Entries]:
    """Return the layers of a launch in ascending precedence."""
    return [*profiles, environment_layer(environ), flags]


def launch_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of the HEADWAY_* variables that only a launch reads."""
    found = [PROFILE_VARIABLE] if PROFILE_VARIABLE in environ else []
    for name, entry in environment_layer(environ).items():
        if name != "cluster":  # a rank reads it, too
            found.append(str(entry.origin.variable))
    return sorted(found)


def environment_layer(environ: Mapping[str, str] = os.environ) -> Entries:
    """Return the layer of the HEADWAY_* variables; the key of an unknown variable is its name.

    Variables that Kubernetes sets for a Service, such as HEADWAY_PORT, are ignored.
    Source: Kubernetes' documentation, environment variables of Services.
    """
    settings = {row.variable: name for name, row in TABLE.items()}
    services = [name.removesuffix(_HOST) for name in environ if name.endswith(_HOST)]
    of_services = tuple(f"{service}{end}" for service in services for end in _OF_SERVICES)
    return {
        settings.get(variable, variable): Entry(text, Origin(Layer.ENVIRONMENT, variable=variable))
        for variable, text in environ.items()
        if variable.startswith(VARIABLE_PREFIX)
        and variable not in _NOT_SETTINGS
        and (variable in settings or not variable.startswith(of_services))
    }


def resolve(
    layers: Sequence[Entries],
    machine: Machine,
    environ: Mapping[str, str] = os.environ,
    cluster: Entries = NOTHING,
) -> Settings:
    """Return a typed value with its origin for each setting; raise a ConfigError with all problems.

    The layers are in ascending precedence, without defaults. The cluster and the machine supply
    the values of settings that are `auto`. OMP_NUM_THREADS in `environ` overrides the detected
    number of threads.
    """
    settings, problems = try_resolve(layers, machine, environ, cluster)
    if problems:
        raise ConfigError.of(problems)
    return settings


def try_resolve(
    layers: Sequence[Entries],
    machine: Machine,
    environ: Mapping[str, str] = os.environ,
    cluster: Entries = NOTHING,
) -> tuple[Settings, list[Problem]]:
    """Return the settings, as `resolve` does, and the problems with invalid values."""
    values, problems, invalid = _read([_of_other_launchers(layers, environ), *layers])
    if values["num_machines"].value == 1:  # the user limits the run to this machine
        cluster = {name: entry for name, entry in cluster.items() if name == "cluster"}
    asked_of_cluster = {
        name: entry
        for name, entry in cluster.items()
        if _is_auto(values[name]) or (name == "cluster" and entry.problems)
    }
    answers, found, unusable = _read([asked_of_cluster])
    problems += found
    invalid |= unusable
    values["device"] = _without_alias(values["device"], machine)
    for name, detect in _DETECT.items():
        if _is_auto(values[name]):
            asked = values[name].origin
            value, origin = answers[name]
            if _is_auto(answers[name]):
                value, origin = detect(Settings(values), machine, environ)
            if asked.layer is not Layer.DEFAULT:
                origin = origin.with_reason(f"auto from {asked}")
            values[name] = Value(value, origin)
            if invalid:  # the detected value may depend on an invalid value
                invalid.add(name)
    return Settings(values, invalid), problems


def _of_other_launchers(layers: Sequence[Entries], environ: Mapping[str, str]) -> Entries:
    """Return the settings in Accelerate's and torchrun's variables, except those that a layer sets.

    In a nested launch, return nothing, because the outer launch set the variables.
    ACCELERATE_USE_CPU is read by `_device`, if `device` is `auto`.
    """
    return {
        name: Entry(environ[variable], Origin(Layer.ENVIRONMENT, variable=variable))
        for name, variable in {**ACCELERATE, "max_restarts": "PET_MAX_RESTARTS"}.items()
        if environ.get(variable) and name != "device" and RUN_VARIABLE not in environ
        if not any(name in layer for layer in layers)
    }


def _is_auto(value: Value) -> bool:
    return bool(value.value == AUTO)


def parse_layers(layers: Sequence[Entries]) -> None:
    """Parse the layers without detection; raise a ConfigError with all problems."""
    _, problems, _ = _read(layers)
    if problems:
        raise ConfigError.of(problems)


def _read(layers: Sequence[Entries]) -> tuple[dict[str, Value], list[Problem], set[str]]:
    """Return the valid values, the problems, and the settings with problems."""
    problems: list[Problem] = []
    invalid: set[str] = set()
    values = dict(_DEFAULTS)
    for layer in layers:
        for name, entry in layer.items():
            problems += entry.problems
            if name not in TABLE:
                problem, meant = _unknown(name, entry.origin)
                problems.append(problem)
                invalid.add(meant)
            elif entry.problems:
                invalid.add(name)
            else:
                try:
                    value = Value(TABLE[name].parse(entry.raw), entry.origin)
                    values[name] = _merged(values[name], value)
                except ValueError as error:
                    problems.append(_bad_value(TABLE[name], entry, error))
                    invalid.add(name)
    return values, problems, invalid


def _merged(old: Value, new: Value) -> Value:
    """Merge two values if they are maps (`env`); otherwise the new value replaces the old one."""
    if isinstance(new.value, dict) and old.value:
        return Value({**old.value, **new.value}, new.origin.with_reason(f"and {old.origin}"))
    return new


def _bad_value(row: Setting[Any], entry: Entry, error: ValueError) -> Problem:
    from headway.ipc.secrets import masked_value

    masked = masked_value(row.name, entry.raw)
    raw = " ".join(masked) if row.shape == "map" and isinstance(masked, list) else str(masked)
    written = raw if len(raw) <= 60 else raw[:57] + "..."
    close = did_you_mean(raw, row.choices)
    either = row.choices or (row.example, str(row.default or row.example))
    example, *others = dict.fromkeys((close or either[0], *either))
    is_optional = row.default is None
    also = f" (or {', '.join(others)})" if others else ""
    fix = {
        Layer.FLAG: f"pass `{row.as_flag(example)}`{also}" + ", or omit it" * is_optional,
        Layer.ENVIRONMENT: f"`export {row.variable}={example}`{also}, or unset it",
        Layer.ASSIGNMENT: f"write {row.name}={example}{also}",
        Layer.CLUSTER: f"correct {entry.origin.variable}, or pass {row.as_flag(row.metavar)}",
    }.get(
        entry.origin.layer, f"write `{row.name}: {example}`{also}" + ", or remove it" * is_optional
    )
    hint = f"; did you mean {close!r}?" if close else ""
    what = f"invalid value {written!r} for {row.name}: {error}{hint}"
    return Problem(what, str(entry.origin), fix, code=Code.BAD_VALUE, names=(row.name,))


def _unknown(name: str, origin: Origin) -> tuple[Problem, str]:
    """Return the problem to report for an unknown name, and the setting probably meant, if any."""
    what, known = f"unknown setting {name!r}", {name: name for name in TABLE}
    if origin.layer is Layer.ENVIRONMENT:
        what = f"unknown variable {name}"
        known = {row.variable: row.name for row in TABLE.values()} | {PROFILE_VARIABLE: ""}
    prefix = VARIABLE_PREFIX if origin.layer is Layer.ENVIRONMENT else ""
    # without the common prefix, which would make all names similar
    ends = {full.removeprefix(prefix): full for full in known}
    close = ends.get(did_you_mean(name.removeprefix(prefix), ends) or "")
    fix = "correct or remove it; `headway config set --help` lists all settings"
    if origin.file and name in ("compute_environment", "distributed_type"):
        fix = f"`headway config import {origin.file}` imports a file of `accelerate config`"
    problem = Problem(
        what + (f"; did you mean {close!r}?" if close else ""),
        str(origin),
        fix,
        code=Code.UNKNOWN_SETTING,
        names=(name,),
    )
    return problem, known.get(close or "", "")


def _without_alias(device: Value, machine: Machine) -> Value:
    """Replace `gpu` with this machine's kind of GPU, or with cuda if the machine has none."""
    if device.value != "gpu":
        return device
    # on a Mac without MPS, the error for mps gives the reason
    is_mac = machine.mps or machine.system == "Darwin"
    name = MPS.name if is_mac and not machine.visible_gpus else machine.gpu_kind
    return Value(name, device.origin.with_reason("gpu"))


Detect = Callable[[Settings, Machine, Mapping[str, str]], Value]


def _detected(value: object, reason: str) -> Value:
    return Value(value, Origin(Layer.DETECTED, reason=reason))


def _always(value: object, reason: str) -> Detect:
    return lambda *_: _detected(value, reason)


def _from_variable(value: object, name: str, text: str, source: str = "environment") -> Value:
    return Value(value, Origin(Layer.DETECTED, variable=name, reason=f"{source} {name}={text}"))


def _device(_: Settings, machine: Machine, environ: Mapping[str, str]) -> Value:
    name = ACCELERATE["device"]
    word = environ.get(name, "").strip().lower()
    # in a nested launch, the outer launcher set this variable, not the user
    if RUN_VARIABLE in environ or word in _NO:
        return _detected(*machine.best_device())
    if word in YES:
        return _from_variable("cpu", name, environ[name])
    raise ConfigError(
        f"invalid value {environ[name]!r} for {name}: not a boolean",
        where=f"environment {name}",
        fix=f"`export {name}=1` to enable it, or unset it",
        code=Code.BAD_VALUE,
    )


def _num_processes(settings: Settings, machine: Machine, _: Mapping[str, str]) -> Value:
    if not kind_of(settings.device).is_numbered:
        return _detected(1, f"one process on {settings.device}")
    visible = machine.gpus_of(settings.device)
    selected = settings.devices.select(visible).indices
    if any(visible[index].slice_of for index in selected):
        return _detected(1, "CUDA shows only one MIG slice to a process")
    count = settings.devices.idle or len(selected)
    return _detected(max(1, count), f"one process for each of {count} GPUs")


def _threads(settings: Settings, machine: Machine, environ: Mapping[str, str]) -> Value:
    name = "OMP_NUM_THREADS"
    for source, variables in (("env", settings.env), ("environment", environ)):
        threads = omp_threads(variables)
        if threads is not None:
            return _from_variable(threads, name, variables[name], source)
    threads = max(1, machine.cores // settings.num_processes)
    return _detected(threads, f"{machine.cores_reason} / {settings.num_processes}")


def omp_threads(variables: Mapping[str, str]) -> int | None:
    """Return the value of OMP_NUM_THREADS; None if it is unset or invalid."""
    first = variables.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    # "4,2" means 4 threads, and 2 in nested regions
    is_number = first.isdecimal() and first.isascii() and len(first) <= 9
    return int(first) if is_number and int(first) > 0 else None


def _by_machines(one: tuple[object, str], several: tuple[object, str]) -> Detect:
    return lambda settings, *_: _detected(*(one if settings.num_machines == 1 else several))


def _start_method(_: Settings, machine: Machine, __: Mapping[str, str]) -> Value:
    if machine.system == "Linux":
        return _detected("fork", "one torch import for all ranks")
    return _detected("exec", f"forking is not safe on {machine.system}")


_DETECT: Mapping[str, Detect] = {  # in the order of their dependencies
    "device": _device,
    "num_processes": _num_processes,
    "strategy": _always(DDP, "a full copy of the model on each rank"),
    "wrap": _always(AUTO, "the model's repeated blocks"),
    "status": _always(AUTO, "a status line on a terminal, a line per minute in a file"),
    "threads_per_process": _threads,
    "num_machines": _always(Machines(1), "one machine"),
    "machine_rank": _by_machines((0, "the only machine"), (None, "assigned at the rendezvous")),
    "main_address": _by_machines((None, "one machine"), (None, "not set")),
    "main_port": _by_machines(
        (None, "one machine: any free port"), (29500, "torch's default port")
    ),
    "cluster": _always(NO_CLUSTER, "no cluster variables"),
    "start_method": _start_method,
}
