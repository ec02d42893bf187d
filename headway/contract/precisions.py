"""The choices of `mixed_precision`, declared once. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class NumberFormat(NamedTuple):
    """The properties of a precision that need no torch.

    Args:
        help: one line that helps to choose.
        dtype: of matrix products, by torch's name.
        tolerance: largest difference of the weights from fp32's after one step.
        mps_torch: the first torch with autocast to it on MPS; () for all.
        mps_macos: the first macOS with support in Metal; () for all.
    """

    help: str
    dtype: str
    tolerance: float
    mps_torch: tuple[int, ...] = ()
    mps_macos: tuple[int, ...] = ()


PRECISIONS: Mapping[str, NumberFormat] = {
    "no": NumberFormat("fp32 throughout, the most memory", "float32", 1e-5),
    "fp16": NumberFormat(
        "half the memory; a small range, so gradients are scaled", "float16", 1e-2, (2, 5)
    ),
    "bf16": NumberFormat(
        "half the memory, with the range of fp32", "bfloat16", 5e-2, (2, 6), (14,)
    ),
}
"""By the names that profiles, flags and scripts use.

Source of the versions: torch's release notes; bf16 is in Metal since macOS 14.
"""
