"""Writes a machine's snapshot as JSON for `headway env --json`, and reads it for `--machine`."""

from __future__ import annotations

import json
from typing import Any

from headway.contract.typed import Misfit, parse, plain, read
from headway.devices.table import KINDS
from headway.errors import ConfigError
from headway.machine.facts import DEFAULT, EXCLUSIVE, PROHIBITED, Machine

VERSION = 1
MAX_BYTES = 2**24
LEAST = {
    **dict.fromkeys(("cores", "logical_cores", "physical_cores", "affinity", "numa_nodes"), 1),
    **dict.fromkeys(("open_files", "processes", "locked_bytes"), -1),  # unlimited
    "cpu_quota": 0.001,  # the kernel's minimum quota in its longest period
}
"""Minimum of each numeric field, if it is not 0."""
LARGEST = 2**63 - 1
CHOICES = {
    "compute_mode": (DEFAULT, EXCLUSIVE, PROHIBITED),
    "gpu_kind": tuple(name for name, kind in KINDS.items() if kind.is_numbered),
}


def to_json(machine: Machine) -> str:
    """Return the snapshot as one JSON object, field by field."""
    return json.dumps(as_data(machine), indent=2)


def as_data(machine: Machine) -> dict[str, Any]:
    """Return the snapshot in dicts, lists and plain values."""
    return {"version": VERSION, **plain(machine)}


def load_machine(path: str) -> Machine:
    """Return the machine in a file written by `headway env --json` or `headway doctor --json`.

    Raises:
        ConfigError: the file cannot be read, or is not a valid snapshot.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise _broken(path, f"cannot be read: {reason}") from None
    place = ""
    try:
        data = parse(text)
        if isinstance(data, dict) and "machine" in data:  # written by `headway doctor --json`
            data, place = data["machine"], "machine"
        if not isinstance(data, dict) or "version" not in data:
            raise Misfit(place, "is not an object with a version")
        version = data.pop("version")
        if type(version) is not int or version != VERSION:
            at = _join(place, "version")
            raise Misfit(at, f"is {version!r}, but this Headway reads version {VERSION}")
        machine = read(Machine, data, place=place, limits=_limits)
        _reject_duplicate_uuids(machine, place)
    except Misfit as invalid:
        reason = f"{invalid.place or 'it'} {invalid.reason}"
        raise _broken(path, f"is not a valid machine snapshot: {reason}", invalid.place) from None
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"is not a valid machine snapshot: {error}") from None
    return machine


def _broken(path: str, reason: str, place: str = "") -> ConfigError:
    return ConfigError(
        f"{path!r} {reason}",
        where=f"flag --machine, {path}" + (f", key {place}" if place else ""),
        fix="create one with `headway env --json > machine.json` on that machine",
    )


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _limits(field: str, data: Any) -> str:
    """Say what is wrong with a plain value of a field of this name, if anything is."""
    if field in CHOICES and data not in CHOICES[field]:
        return f"is {data!r}, not one of {', '.join(CHOICES[field])}"
    if type(data) in (int, float):
        least = LEAST.get(field, 0)
        if not data >= least:  # also rejects NaN
            return f"is {data}, but must be at least {least}"
        if data > LARGEST:
            return f"is {data}, which is too large"
    return ""


def _reject_duplicate_uuids(machine: Machine, place: str) -> None:
    """Raise Misfit if two GPUs have the same UUID."""
    first: dict[str, str] = {}
    for index, gpu in enumerate(machine.gpus):
        at = _join(place, f"gpus[{index}]")
        uuids = {at: gpu.uuid}
        uuids |= {f"{at}.slices[{number}]": part.uuid for number, part in enumerate(gpu.slices)}
        for owner, uuid in uuids.items():
            if uuid in first:
                raise Misfit(f"{owner}.uuid", f"is {uuid!r}, a duplicate of {first[uuid]}")
            first[uuid] = owner
