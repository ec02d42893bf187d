"""The choices of `mixed_precision`, declared once. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class NumberFormat(NamedTuple):
    """The properties of a precision that need no torch."""

    help: str  # one line that helps to choose
    dtype: str  # of matrix products, by torch's name
    tolerance: float = 5e-2  # the largest difference of the weights from fp32's after one step
    only_on: tuple[str, ...] = ()  # the device kinds that may have it; empty: all
    capability: tuple[int, int] = (0, 0)  # the oldest compute capability of NVIDIA's GPUs with it
    instead: str = "no"  # what to use on a GPU that is older


PRECISIONS: Mapping[str, NumberFormat] = {
    "no": NumberFormat("fp32 throughout, the most memory", "float32", 1e-5),
    "fp16": NumberFormat(
        "half the memory; a small range, so gradients are scaled", "float16", 1e-2
    ),
    "bf16": NumberFormat(
        "half the memory, with the range of fp32",
        "bfloat16",
        5e-2,
        capability=(8, 0),
        instead="fp16",
    ),
}
"""By the names that profiles, flags and scripts use."""


def precisions_of(kind: str, lacking: Sequence[str]) -> list[str]:
    return [
        name
        for name, row in PRECISIONS.items()
        if name not in ("no", *lacking) and (not row.only_on or kind in row.only_on)
    ]
