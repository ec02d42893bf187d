"""Messages between processes: NamedTuples, one line of JSON each, `["Name", value, ...]`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from headway.contract.typed import read

_dumps, _loads = json.dumps, json.loads  # a script may replace them


def kinds_of(*kinds: type) -> dict[str, Any]:
    """Return these kinds of messages by the names that start their lines."""
    return {kind.__name__: kind for kind in kinds}


def encode(message: Any) -> bytes:
    """Return a message as a line, with its end."""
    text = _dumps([type(message).__name__, *message], separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"  # a lone surrogate, as JSON has it


def decode(kinds: Mapping[str, Any], line: bytes | str) -> Any:
    """Return the message in a line; ValueError for another kind, a missing or a mistyped value."""
    try:
        name, *values = _loads(line)
        return read(kinds[name], values)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is no message: {error}") from None


class TooLong(ValueError):
    """A line exceeds the limit."""


class Lines:
    """Splits incoming data into lines of at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._parts: list[bytes] = []  # of the unfinished line
        self._size = 0

    @property
    def has_part(self) -> bool:
        """Whether an incomplete line has arrived."""
        return self._size > 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that `data` completes, without their ends; drop one that is TooLong."""
        *ended, rest = data.split(b"\n")
        for part in ended:
            line = b"".join([*self._parts, part])
            self._begin(b"")
            self._check(len(line))
            yield line
        self._parts.append(rest)
        self._size += len(rest)
        self._check(self._size)

    def _begin(self, part: bytes) -> None:
        self._parts, self._size = [part], len(part)

    def _check(self, size: int) -> None:
        if size > self.limit:
            self._begin(b"")
            raise TooLong(f"a line is longer than {self.limit} bytes")
