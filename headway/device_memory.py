"""Frees the memory of a device: objects that are dropped, and what torch caches."""

from __future__ import annotations

import gc
from typing import Any

import torch


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give back the memory that torch caches on the GPU, where there is one.

    Args:
        garbage_collection: first free unreachable objects in cycles, which takes a while.
    """
    if garbage_collection:
        gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # pragma: needs a GPU
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():  # pragma: needs a Mac
        torch.mps.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Free what `objects` hold, once the script drops them: `a, b = release_memory(a, b)`.

    Returns:
        A None for each of `objects`.
    """
    released = [None] * len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return released
