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
    """Return the machine that `headway env --json` or `headway doctor --json` wrote to a file."""
    key = ""
    try:
        with open(path, encoding="utf-8") as file:
            return _read(parse(file.read(MAX_BYTES)))
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except Misfit as invalid:
        key = invalid.place
        reason = f"is not a valid machine snapshot: {key or 'it'} {invalid.reason}"
    except (ValueError, RecursionError) as error:
        reason = f"is not a valid machine snapshot: {error}"
    raise ConfigError(
        f"{path!r} {reason}",
        where=f"flag --machine, {path}" + f", key {key}" * bool(key),
        fix="create one with `headway env --json > machine.json` on that machine",
    )


def _read(data: Any) -> Machine:
    if isinstance(data, dict) and "machine" in data:  # written by `headway doctor --json`
        data = data["machine"]
    if not isinstance(data, dict) or "version" not in data:
        raise Misfit("", "is not an object with a version")
    version = data.pop("version")
    if type(version) is not int or version != VERSION:
        raise Misfit("version", f"is {version!r}, but this Headway reads version {VERSION}")
    machine = read(Machine, data, limits=_limits)
    first: dict[str, str] = {}
    for index, gpu in enumerate(machine.gpus):
        at = f"gpus[{index}]"
        uuids = {f"{at}.slices[{number}]": part.uuid for number, part in enumerate(gpu.slices)}
        for owner, uuid in {at: gpu.uuid, **uuids}.items():
            if uuid in first:
                raise Misfit(f"{owner}.uuid", f"is {uuid!r}, a duplicate of {first[uuid]}")
            first[uuid] = owner
    return machine


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
