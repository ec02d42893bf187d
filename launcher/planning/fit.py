"""`--fit`: a profile that was written on another machine, adapted to this one, change by change."""

from __future__ import annotations

from collections.abc import Callable

from headway.contract.origin import Layer, Origin
from headway.launcher.planning.checks import impossible_here
from headway.machine.facts import Machine
from headway.settings.profile import Entries, Entry
from headway.settings.table import Settings


def fit(
    layers: list[Entries], machine: Machine, settle: Callable[[list[Entries]], Settings]
) -> tuple[list[Entries], list[str]]:
    """Return the layers with one on top that adapts them to `machine`, and what it changes.

    What was typed as a flag for this launch is not touched: it is obeyed or refused.

    Args:
        layers: from the weakest to the strongest.
        machine: this machine.
        settle: resolves layers to settings.
    """
    fitted: dict[str, Entry] = {}
    before = settle(layers)
    for name, raw in (
        *(("device", "auto"), ("devices", "all"), ("num_processes", "auto")),
        *(("mixed_precision", "fp16"), ("mixed_precision", "no")),
    ):
        settings = settle([*layers, fitted])
        if settings.origin(name).layer in (Layer.DEFAULT, Layer.FLAG) or not _is_amiss(
            name, settings, machine, fitted
        ):
            continue
        if name == "devices" and settings.device == "cuda" and settings.devices.idle is not None:
            idle = len(settings.devices.select(machine.visible_gpus).indices)
            if not idle:
                continue  # refused, or waited for
            raw = f"idle:{idle}"
        reason = f"instead of {before.origin(name)}"
        fitted[name] = Entry(raw, Origin(Layer.DETECTED, flag="--fit", reason=reason))
    after = settle([*layers, fitted])
    changes = [
        f"--fit: {name} {before.values[name].value} -> {after.values[name].value} "
        f"({before.origin(name)}; {machine.best_device()[1]})"
        for name in fitted
        if before.values[name].value != after.values[name].value
    ]
    return [*layers, fitted], changes


def _is_amiss(name: str, settings: Settings, machine: Machine, fitted: Entries) -> bool:
    """Return whether this machine cannot do what the setting `name` asks."""
    device = settings.device
    if name == "device":
        return machine.best_device()[0] != device != "cpu"
    if name == "devices":
        wrong = settings.devices.select(machine.visible_gpus).wrong
        return device != "cuda" or bool(wrong)
    if name == "num_processes":
        was_gpus = device == "cpu" and "device" in fitted
        return was_gpus or _says(f"{name} is", settings, machine)
    return _says(f"{name} is", settings, machine) or (
        device == "cpu" and settings.mixed_precision == "fp16"
    )


def _says(beginning: str, settings: Settings, machine: Machine) -> bool:
    return any(problem.what.startswith(beginning) for problem in impossible_here(settings, machine))
