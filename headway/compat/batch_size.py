"""Accelerate's search for a batch size that fits: each size is nine tenths of the last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headway.memory import batch_size

FACTOR = 0.9


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """See `headway.memory.batch_size.find_executable_batch_size`, which halves the size instead."""
    find: Any = batch_size.find_executable_batch_size
    return find(function, starting_batch_size, reduce_batch_size_fn, factor=FACTOR)
