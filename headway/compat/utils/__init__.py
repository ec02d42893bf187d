"""Names of `accelerate.utils`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from headway.compat.forwarding import forward
from headway.memory import oom

import_module(f"{__name__}.tqdm")  # an attribute from here on, which would hide the function
del globals()["tqdm"]

__getattr__, __dir__ = forward(__name__)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """See `headway.memory.oom.find_executable_batch_size`, which halves the size instead.

    Each size is nine tenths of the last one, as in Accelerate.
    """
    find: Any = oom.find_executable_batch_size
    return find(function, starting_batch_size, reduce_batch_size_fn, factor=0.9)
