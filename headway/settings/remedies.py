"""The steps that solve problems of settings."""

from __future__ import annotations

from headway.errors import Do, Remedy, Step
from headway.settings.table import Settings


def change(name: str, value: object, note: str = "") -> Step:
    """Return the step that sets a setting."""
    return Step(Do.SET, name, str(value), note)


def removal(name: str, note: str = "") -> Step:
    """Return the step that removes a setting, or one variable: env.NAME."""
    return Step(Do.REMOVE, name, note=note)


def on_cpu(settings: Settings) -> Remedy:
    """Return the steps to the CPU, with what does not suit it taken back."""
    steps = [change("device", "cpu")]
    if settings.origin("devices").is_user_set:
        steps.append(removal("devices"))
    if settings.mixed_precision == "fp16":
        steps.append(change("mixed_precision", "bf16"))
    return tuple(steps)


def on_one_machine(settings: Settings) -> Remedy:
    """Return the steps to a run on one machine."""
    has_rank = settings.origin("machine_rank").is_user_set and bool(settings.machine_rank)
    return (change("num_machines", 1), *([removal("machine_rank")] if has_rank else []))
