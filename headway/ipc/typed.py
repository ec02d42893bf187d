"""NamedTuples as JSON, with a strict reader that checks each value against its declared type.

A NamedTuple is read from an object, in which fields with defaults are optional, or from a list of
all values, which is how `json` writes a NamedTuple. A message between processes is one line of
JSON: `["Name", value, ...]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_LARGEST = 2**1023
_dumps, _loads = json.dumps, json.loads  # a script may replace them


class SchemaError(ValueError):
    """Raised if a value does not match its declared type.

    `place` is the path to the value, such as gpus[0].uuid; the message starts with it.
    """

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place or 'it'} {reason}")
        self.place = place


def plain(value: Any) -> Any:
    """Convert a value to dicts, lists and plain values, which `read` accepts."""
    if hasattr(value, "_asdict"):
        return {name: plain(part) for name, part in value._asdict().items()}
    if isinstance(value, (tuple, list)):
        return [plain(part) for part in value]
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if hasattr(type(value), "__members__"):
        return value.name
    # torch.__version__ is a subclass of str
    return str(value) if isinstance(value, str) else value


def read(kind: type[T], data: Any) -> T:
    """Convert parsed JSON to a `kind`, or raise SchemaError.

    `kind` is a NamedTuple with fields that are plain values, enumerations (by name), other
    NamedTuples, tuples or maps of these, or None where declared.
    """
    value: T = _read(kind, data, "")
    return value


def _read(kind: Any, data: Any, place: str) -> Any:
    origin = get_origin(kind)
    if origin in (UnionType, Union):  # X | None
        return None if data is None else _read(get_args(kind)[0], data, place)
    if hasattr(kind, "_fields"):
        return _read_fields(kind, data, place)
    if origin is tuple:
        return _read_items(get_args(kind), data, place)
    if origin is not None:  # Mapping[str, X]
        if type(data) is not dict:
            raise SchemaError(place, "is not a map")
        inner = get_args(kind)[1]
        return {name: _read(inner, item, f"{place}[{name!r}]") for name, item in data.items()}
    if hasattr(kind, "__members__"):
        if data not in kind.__members__:
            raise SchemaError(place, f"is {shown(data)}, not one of {', '.join(kind.__members__)}")
        return kind[data]
    if type(data) is not kind and not (kind is float and type(data) is int):
        raise SchemaError(place, f"is {shown(data)}, not of type {kind.__name__}")
    if type(data) is int and kind is float and abs(data) > _LARGEST:
        raise SchemaError(place, f"is {shown(data)}, which is too large")
    return kind(data)


@cache
def types_of(kind: Any) -> dict[str, Any]:
    """Return the declared types of a class's fields or a function's parameters."""
    return get_type_hints(kind)


def _read_fields(kind: Any, data: Any, place: str) -> Any:
    types = types_of(kind)
    if type(data) is list:
        if len(data) != len(types):
            raise SchemaError(place, f"has {len(data)} values, not {len(types)}")
        data = dict(zip(types, data, strict=True))
    if type(data) is not dict:
        raise SchemaError(place, "is not an object")
    unknown = data.keys() - types.keys()
    missing = types.keys() - data.keys() - kind._field_defaults.keys()
    for names, wrong in ((unknown, "unknown"), (missing, "missing")):
        if names:
            raise SchemaError(place, f"has {wrong} fields: {', '.join(sorted(names))}")
    prefix = f"{place}." if place else ""
    values = {name: _read(types[name], value, prefix + name) for name, value in data.items()}
    return kind(**values)


def _read_items(kinds: tuple[Any, ...], data: Any, place: str) -> tuple[Any, ...]:
    if type(data) is not list:
        raise SchemaError(place, "is not a list")
    if kinds[-1] is Ellipsis:
        if kinds[0] in (int, str) and {*map(type, data)} == {kinds[0]}:
            return tuple(data)
        kinds = kinds[:1] * len(data)
    if len(kinds) != len(data):
        raise SchemaError(place, f"has {len(data)} entries, not {len(kinds)}")
    return tuple(
        _read(kind, item, f"{place}[{index}]")
        for index, (kind, item) in enumerate(zip(kinds, data, strict=True))
    )


def shown(data: Any) -> str:
    """Format a value for a message, in at most 60 characters."""
    text = " ".join(repr(data).split())
    return text if len(text) <= 60 else text[:57] + "..."


# ------------------------------------------------------------------ messages


def encode(message: Any) -> bytes:
    """Return a message as a line, including the newline."""
    text = _dumps([type(message).__name__, *message], separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"  # escapes a lone surrogate as JSON does


def decode(kind: Any, line: bytes | str) -> Any:
    """Decode a line to a `kind`, which is a message type or a union of message types.

    Raises ValueError for another message type or an invalid value.
    """
    kinds = {kind.__name__: kind for kind in get_args(kind) or (kind,)}
    try:
        name, *values = _loads(line)
        return read(kinds[name], values)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a valid message: {error}") from None


class TooLong(ValueError):
    """Raised if a line exceeds the limit."""


class Lines:
    """Splits incoming data into lines of at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._part = bytearray()  # of the unfinished line

    @property
    def has_part(self) -> bool:
        """Whether an incomplete line has arrived."""
        return bool(self._part)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield completed lines without newlines; discard an overlong line and raise TooLong."""
        *ended, rest = data.split(b"\n")
        for part in ended:
            self._add(part)
            line = bytes(self._part)
            self._part.clear()
            yield line
        self._add(rest)

    def _add(self, part: bytes) -> None:
        self._part += part
        if len(self._part) > self.limit:
            self._part.clear()
            raise TooLong(f"a line is longer than {self.limit} bytes")
