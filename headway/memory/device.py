"""The memory of a device, freed."""

from __future__ import annotations

import gc
from typing import Any

from headway.devices.table import KINDS, outside_kinds


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
    for kind in (*KINDS.values(), *outside_kinds().values()):
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
