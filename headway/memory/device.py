"""The memory of a device: freed, and compared with its estimate when the script has ended."""

from __future__ import annotations

import atexit
import gc
import sys
from functools import cache
from typing import Any

from headway.contract.memory_use import describe_memory_use, read_memory_use
from headway.contract.notes import say
from headway.contract.progress import Progress
from headway.devices.table import KINDS


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give back the memory that torch caches on the GPU, where there is one.

    Args:
        garbage_collection: first free unreachable objects in cycles, which takes a while.

    Examples:
        >>> from headway.utils import clear_device_cache
        >>> clear_device_cache(garbage_collection=True)
    """
    if garbage_collection:
        gc.collect()
    for kind in KINDS.values():
        kind.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Free what `objects` hold, once the script drops them: `a, b = release_memory(a, b)`.

    Returns:
        A None for each of `objects`.

    Examples:
        >>> import torch
        >>> from headway.utils import release_memory
        >>> model, batch = torch.nn.Linear(2, 1), torch.ones(4, 2)
        >>> model, batch = release_memory(model, batch)
        >>> model is None
        True
    """
    released = [None] * len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return released


@cache
def tell_memory_at_exit(estimated_bytes: int, progress: Progress) -> None:
    """Say at the end of a successful script what it was estimated to take, and what it took, once.

    Under a launcher, that itself says so, of all ranks.
    """
    atexit.register(_tell_memory, estimated_bytes, progress)


def _tell_memory(estimated_bytes: int, progress: Progress) -> None:
    has_failed = getattr(sys, "last_type", None) is not None
    use = None if has_failed or progress.is_connected else read_memory_use()
    if use is not None:
        say(describe_memory_use(estimated_bytes, {0: use}))
