"""The choices of `mixed_precision`, declared once. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class NumberFormat(NamedTuple):
    """The properties of a precision that need no torch."""

    help: str  # one line that helps to choose
    dtype: str  # of matrix products, by torch's name
    tolerance: float  # the largest difference of the weights from fp32's after one step


PRECISIONS: Mapping[str, NumberFormat] = {
    "no": NumberFormat("fp32 throughout, the most memory", "float32", 1e-5),
    "fp16": NumberFormat(
        "half the memory; a small range, so gradients are scaled", "float16", 1e-2
    ),
    "bf16": NumberFormat("half the memory, with the range of fp32", "bfloat16", 5e-2),
}
"""By the names that profiles, flags and scripts use."""
