"""What is set and not used: the note after a successful run, and the settings that it is about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.contract.records import Uses
from headway.contract.run import ACCELERATE
from headway.contract.strategies import SETTINGS as SHARING
from headway.contract.strategies import SHARDED
from headway.launcher.plan.accelerate import fsdp_variables
from headway.settings.table import TABLE, Settings

_FOR_ANY_RUNTIME = tuple(name for name in ACCELERATE if name != "device")
"""Settings of the Accelerator that other libraries may read from Accelerate's variables."""


def unused(settings: Settings, ranks: Sequence[Uses | None]) -> list[str]:
    """Return one note for all settings that had no effect, or none.

    Nothing is said of what a library may have used, or where a rank did not report its end.

    Args:
        settings: those of the run.
        ranks: what each rank on this machine has used.
    """
    known = [uses for uses in ranks if uses is not None]
    if len(known) < len(ranks):
        return []
    has_reader = any(uses.readers for uses in known)
    parts = []
    if not any(uses.accelerator for uses in known):
        has_accelerate = any("accelerate" in uses.readers for uses in known)
        is_sharded = has_accelerate and bool(fsdp_variables(settings))
        parts += _without_accelerator(settings, has_reader, is_sharded)
    if not any(uses.resuming for uses in known):
        parts += _not_asked_for(settings, "resume", "neither accelerator.resume() nor")
    if not any(uses.stopping for uses in known):
        parts += _not_asked_for(settings, "time_limit", "neither accelerator.should_stop nor")
    if not has_reader and not any(uses.group for uses in known):
        parts += _without_group(settings)
    return ["; ".join(parts)] if parts else []


def sharing_asked(settings: Settings) -> list[str]:
    """Return the settings that ask for more than a copy of the model on each rank."""
    is_alone = settings.num_processes * settings.num_machines == 1
    is_sharded = settings.strategy in SHARDED and not is_alone
    asked = [name for name in SHARING if not _is_default(settings, name)]
    if not is_sharded:  # the others have no effect, which a note before the start says
        asked = [name for name in asked if name == "activation_checkpointing"]
    return asked


def _without_accelerator(settings: Settings, has_reader: bool, is_sharded: bool) -> list[str]:
    names = [
        name for name in (() if has_reader else _FOR_ANY_RUNTIME) if not _is_default(settings, name)
    ]
    names += [] if is_sharded else sharing_asked(settings)
    if not names:
        return []
    values = listed(f"{name} {settings.values[name].value}" for name in names)
    were = "was" if len(names) == 1 else "were"
    return [
        f"{values} {were} not used: the script made no Accelerator of Headway's"
        f" ({settings.where(*names)})"
    ]


def listed(parts: Iterable[str]) -> str:
    """Return the parts as one enumeration: a, b and c."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _not_asked_for(settings: Settings, name: str, neither: str) -> list[str]:
    if _is_default(settings, name):
        return []
    return [
        f"{name} was not used: the script calls {neither} accelerator.checkpoint(), and no Trainer"
        f" of a library was joined ({settings.where(name)})"
    ]


def _is_default(settings: Settings, name: str) -> bool:
    return bool(settings.values[name].value == TABLE[name].default)


def _without_group(settings: Settings) -> list[str]:
    count = settings.num_processes * settings.num_machines
    if count == 1:
        return []
    return [
        f"no rank joined a process group: all {count} ranks did the same work, unless the script "
        "reads RANK"
    ]
