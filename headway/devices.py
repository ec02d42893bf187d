"""How `devices` is written: 3, -1, [0], [1, 3], "1, 3", "1,", all. Lightning's table, exactly.

A lone number is a count, a list or anything with a comma is indices. Pure text and numbers; whether
those GPUs exist is for the plan to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class DeviceSpec(NamedTuple):
    """The `first` so many GPUs (None: all of them), or exactly `indices`, in that order."""

    first: int | None = None
    indices: tuple[int, ...] | None = None

    def select(self, available: int) -> tuple[int, ...]:
        """Return the indices meant on a machine with `available` GPUs; some may not exist."""
        if self.indices is not None:
            return self.indices
        return tuple(range(available if self.first is None else self.first))

    def __str__(self) -> str:
        if self.indices is not None:
            return ",".join(map(str, self.indices)) + ("," if len(self.indices) == 1 else "")
        return "all" if self.first is None else str(self.first)

    def reading(self) -> str:
        """Return in words how the spec was understood."""
        if self.indices is not None:
            return "GPU " + ", ".join(map(str, self.indices))
        if self.first is None:
            return "all GPUs"
        return f"the first {self.first} GPUs; for GPU {self.first} write `{self.first},`"


ALL = DeviceSpec()


def parse_devices(raw: str | Sequence[str]) -> DeviceSpec:
    """Return the meaning of a `devices` value from a flag, a variable or a profile.

    Raises:
        ValueError: it has none; the text says why, to follow "devices is '...', ".
    """
    if not isinstance(raw, str):
        return DeviceSpec(indices=_indices(raw))
    text = raw.strip()
    if text in ("all", "auto", "-1"):
        return ALL
    if text.startswith("[") and text.endswith("]"):
        return DeviceSpec(indices=_indices(text[1:-1].split(",")))
    if "," in text:
        return DeviceSpec(indices=_indices(text.removesuffix(",").split(",")))
    if not _is_number(text) or int(text) == 0:
        raise ValueError("which is neither a count, nor a list of indices such as 0,2, nor all")
    return DeviceSpec(first=int(text))


def _is_number(text: str) -> bool:
    """True for a number that could count the GPUs of a machine."""
    return text.isascii() and text.isdecimal() and len(text) <= 4


def _indices(parts: Sequence[str]) -> tuple[int, ...]:
    for part in parts:
        if not _is_number(part.strip()):
            raise ValueError(f"in which {part.strip()!r} is not the index of a GPU")
    indices = tuple(int(part) for part in parts)
    if len(set(indices)) < len(indices):
        raise ValueError("which names a GPU twice")
    return indices
