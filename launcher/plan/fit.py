"""`--fit`: adapts a profile from another machine to this one, and lists each change."""

from __future__ import annotations

from collections.abc import Callable, Collection

from headway.contract.origin import Layer, Origin
from headway.devices.table import kind_of
from headway.errors import Code
from headway.machine.facts import Machine
from headway.settings.problems import problems
from headway.settings.profile import Entries, Entry
from headway.settings.table import Settings


def fit(
    layers: list[Entries], machine: Machine, resolve: Callable[[list[Entries]], Settings]
) -> tuple[list[Entries], list[str]]:
    """Return the layers plus one that adapts them to `machine`, and a line for each change.

    Settings that were passed as flags are not changed.
    """
    fitted: dict[str, Entry] = {}
    before = resolve(layers)
    for name, raw in (
        *(("device", "auto"), ("devices", "all"), ("num_processes", "auto")),
        *(("mixed_precision", "fp16"), ("mixed_precision", "no")),
    ):
        settings = resolve([*layers, fitted])
        if settings.origin(name).layer in (Layer.DEFAULT, Layer.FLAG) or not _must_change(
            name, settings, machine, fitted
        ):
            continue
        is_numbered = kind_of(settings.device).is_numbered
        if name == "devices" and is_numbered and settings.devices.idle is not None:
            idle = len(settings.devices.select(machine.gpus_of(settings.device)).indices)
            if not idle:
                continue  # rejected or waited for later
            raw = f"idle:{idle}"
        reason = f"instead of {before.origin(name)}"
        fitted[name] = Entry(raw, Origin(Layer.DETECTED, flag="--fit", reason=reason))
    after = resolve([*layers, fitted])
    changes = [
        f"--fit: {name} {before.values[name].value} -> {after.values[name].value} "
        f"({before.origin(name)}; {machine.best_device()[1]})"
        for name in fitted
        if before.values[name].value != after.values[name].value
    ]
    return [*layers, fitted], changes


def _must_change(name: str, settings: Settings, machine: Machine, fitted: Collection[str]) -> bool:
    """Return whether the value of the setting `name` is impossible on this machine."""
    device = settings.device
    if name == "device":
        return machine.best_device()[0] != device != "cpu"
    if name == "devices":
        selection = settings.devices.select(machine.gpus_of(device))
        return not kind_of(device).is_numbered or bool(selection.problems)
    is_for_gpus = name == "num_processes" and device == "cpu" and "device" in fitted
    return is_for_gpus or any(
        problem.names[:1] == (name,) and (problem.is_of_machine or problem.code is Code.FP16_ON_CPU)
        for problem in problems(settings, machine)
    )
