"""A machine's snapshot as JSON: `headway env --json` writes it, `--machine FILE` reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from headway.errors import ConfigError
from headway.machine import Machine

VERSION = 1
MAX_BYTES = 2**24


def to_json(machine: Machine) -> str:
    """Return the snapshot as one JSON object, field by field."""
    return json.dumps(as_data(machine), indent=2)


def as_data(machine: Machine) -> dict[str, Any]:
    """Return the snapshot in dicts, lists and plain values."""
    return {"version": VERSION, **_plain(machine)}


def load_machine(path: str) -> Machine:
    """Return the machine that a file describes; `headway env --json` and `headway doctor --json`.

    Raises:
        ConfigError: the file cannot be read, or holds no snapshot.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise _broken(path, f"cannot be read: {error}") from None
    try:
        data = json.loads(text)
        if isinstance(data, dict) and "machine" in data:  # what doctor printed
            data = data["machine"]
        if not isinstance(data, dict) or "version" not in data:
            raise ValueError("it is no object with a version")
        if (version := data.pop("version")) != VERSION:
            raise ValueError(f"its version is {version!r}, and this Headway reads {VERSION}")
        machine: Machine = _typed(Machine, data, "machine")
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"holds no snapshot of a machine: {error}") from None
    return machine


def _broken(path: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{path!r} {reason}",
        where="flag --machine",
        fix="write one with `headway env --json > machine.json`, on the machine in question",
    )


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return dict(value) if isinstance(value, Mapping) else value


def _typed(kind: Any, data: Any, place: str) -> Any:
    """Return `data` as the type that an annotation names; ValueError where it does not fit."""
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
            raise ValueError(f"{place} is no map of texts")
        return data
    if kind is float and type(data) is int:
        return float(data)
    if type(data) is not kind:
        raise ValueError(f"{place} is {str(data)[:40]!r}, not of type {kind.__name__}")
    return data


def _fields(kind: Any, data: Any, place: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{place} is no object")
    hints = get_type_hints(kind)
    unknown = data.keys() - hints.keys()
    missing = hints.keys() - data.keys() - kind._field_defaults.keys()
    for names, wrong in ((unknown, "unknown"), (missing, "missing")):
        if names:
            raise ValueError(f"{place} has {wrong} fields: {', '.join(sorted(names))}")
    return kind(
        **{name: _typed(hints[name], value, f"{place}.{name}") for name, value in data.items()}
    )


def _items(kinds: tuple[Any, ...], data: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise ValueError(f"{place} is no list")
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(data)
    if len(kinds) != len(data):
        raise ValueError(f"{place} has {len(data)} entries, not {len(kinds)}")
    return tuple(
        _typed(kind, item, f"{place}[{index}]")
        for index, (kind, item) in enumerate(zip(kinds, data, strict=True))
    )
