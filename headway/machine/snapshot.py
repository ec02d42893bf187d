"""Writes a machine's snapshot as JSON for `headway env --json`, and reads it for `--machine`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

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
    return {"version": VERSION, **_plain(machine)}


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
        data = json.loads(text, object_pairs_hook=_reject_duplicate_keys)
        if isinstance(data, dict) and "machine" in data:  # written by `headway doctor --json`
            data, place = data["machine"], "machine"
        if not isinstance(data, dict) or "version" not in data:
            raise _InvalidSnapshot(place, "is not an object with a version")
        version = data.pop("version")
        if type(version) is not int or version != VERSION:
            at = _join(place, "version")
            raise _InvalidSnapshot(
                at, f"is {_shown(version)}, but this Headway reads version {VERSION}"
            )
        machine: Machine = _typed(Machine, data, place)
        _reject_duplicate_uuids(machine, place)
    except _InvalidSnapshot as invalid:
        reason = f"{invalid.place or 'it'} {invalid.reason}"
        raise _broken(path, f"is not a valid machine snapshot: {reason}", invalid.place) from None
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"is not a valid machine snapshot: {error}") from None
    return machine


class _InvalidSnapshot(ValueError):
    """A value that is not valid in a snapshot.

    Args:
        place: the keys that lead to it: gpus[0].uuid; "" for the whole.
        reason: a predicate, without the subject.
    """

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(place, reason)
        self.place, self.reason = place, reason


def _broken(path: str, reason: str, place: str = "") -> ConfigError:
    return ConfigError(
        f"{path!r} {reason}",
        where=f"flag --machine, {path}" + (f", key {place}" if place else ""),
        fix="create one with `headway env --json > machine.json` on that machine",
    )


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return dict(value) if isinstance(value, Mapping) else value


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for name, value in pairs:
        if name in data:  # json would silently drop the first
            raise _InvalidSnapshot("", f"has the duplicate key {name!r}")
        data[name] = value
    return data


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _typed(kind: Any, data: Any, place: str) -> Any:
    """Return `data` converted to the annotated type; raise _InvalidSnapshot if it cannot be."""
    if isinstance(kind, UnionType):
        if data is None and NoneType in get_args(kind):
            return None
        return _typed(get_args(kind)[0], data, place)
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _fields(kind, data, place)
    if get_origin(kind) is tuple:
        return _items(get_args(kind), data, place)
    if get_origin(kind) is not None:  # Mapping[str, str]
        if not isinstance(data, dict) or not all(isinstance(one, str) for one in data.values()):
            raise _InvalidSnapshot(place, "is not a map of strings")
        return data
    return _scalar(kind, data, place)


def _scalar(kind: Any, data: Any, place: str) -> Any:
    if type(data) is not kind and not (kind is float and type(data) is int):
        raise _InvalidSnapshot(place, f"is {_shown(data)}, not of type {kind.__name__}")
    field = place.rpartition(".")[2]
    if field in CHOICES and data not in CHOICES[field]:
        raise _InvalidSnapshot(place, f"is {_shown(data)}, not one of {', '.join(CHOICES[field])}")
    if kind in (int, float):
        least = LEAST.get(field, 0)
        if not data >= least:  # also rejects NaN
            raise _InvalidSnapshot(place, f"is {_shown(data)}, but must be at least {least}")
        if data > LARGEST:
            raise _InvalidSnapshot(place, f"is {_shown(data)}, which is too large")
    return kind(data)


def _shown(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 60 else text[:57] + "..."


def _fields(kind: Any, data: Any, place: str) -> Any:
    if not isinstance(data, dict):
        raise _InvalidSnapshot(place, "is not an object")
    hints = get_type_hints(kind)
    unknown = data.keys() - hints.keys()
    missing = hints.keys() - data.keys() - kind._field_defaults.keys()
    for names, wrong in ((unknown, "unknown"), (missing, "missing")):
        if names:
            raise _InvalidSnapshot(place, f"has {wrong} fields: {', '.join(sorted(names))}")
    return kind(
        **{name: _typed(hints[name], value, _join(place, name)) for name, value in data.items()}
    )


def _items(kinds: tuple[Any, ...], data: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise _InvalidSnapshot(place, "is not a list")
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(data)
    if len(kinds) != len(data):
        raise _InvalidSnapshot(place, f"has {len(data)} entries, not {len(kinds)}")
    return tuple(
        _typed(kind, item, f"{place}[{index}]")
        for index, (kind, item) in enumerate(zip(kinds, data, strict=True))
    )


def _reject_duplicate_uuids(machine: Machine, place: str) -> None:
    """Raise _InvalidSnapshot if two GPUs have the same UUID."""
    first: dict[str, str] = {}
    for index, gpu in enumerate(machine.gpus):
        at = _join(place, f"gpus[{index}]")
        uuids = {at: gpu.uuid}
        uuids |= {f"{at}.slices[{number}]": part.uuid for number, part in enumerate(gpu.slices)}
        for owner, uuid in uuids.items():
            if uuid in first:
                raise _InvalidSnapshot(
                    f"{owner}.uuid", f"is {_shown(uuid)}, a duplicate of {first[uuid]}"
                )
            first[uuid] = owner
