"""The note after a successful run whose script used none of what a setting gives it."""

from __future__ import annotations

from collections.abc import Sequence

from headway.contract.records import Uses
from headway.settings.table import TABLE, Settings

_OF_THE_ACCELERATOR = ("mixed_precision", "gradient_accumulation_steps")


def unused(settings: Settings, ranks: Sequence[Uses | None]) -> list[str]:
    """Return one note for all settings that had no effect, or none.

    Nothing is said where a library may have used them, or where a rank did not report its end.

    Args:
        settings: those of the run.
        ranks: what each rank on this machine has used.
    """
    known = [uses for uses in ranks if uses is not None]
    if len(known) < len(ranks) or any(uses.readers for uses in known):
        return []
    parts = []
    if not any(uses.accelerator for uses in known):
        parts += _without_accelerator(settings)
    if not any(uses.resuming for uses in known):
        parts += _without_resuming(settings)
    if not any(uses.group for uses in known):
        parts += _without_group(settings)
    return ["; ".join(parts)] if parts else []


def _without_accelerator(settings: Settings) -> list[str]:
    names = [name for name in _OF_THE_ACCELERATOR if not _is_default(settings, name)]
    if not names:
        return []
    values = " and ".join(f"{name} {settings.values[name].value}" for name in names)
    were = "was" if len(names) == 1 else "were"
    return [f"{values} {were} not used: the script made no Accelerator ({settings.where(*names)})"]


def _without_resuming(settings: Settings) -> list[str]:
    names = [name for name in ("resume", "time_limit") if not _is_default(settings, name)]
    if not names:
        return []
    were = "was" if len(names) == 1 else "were"
    return [
        f"{' and '.join(names)} {were} not used: the script called neither accelerator.resume() nor"
        f" accelerator.checkpoint() ({settings.where(*names)})"
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
