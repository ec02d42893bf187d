"""Names of `accelerate.utils`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch

from headway.compat.forwarding import forward
from headway.memory import find_executable_batch_size as find_by_halving
from headway.memory import is_out_of_memory

import_module(f"{__name__}.tqdm")  # sets an attribute that would hide the function
del globals()["tqdm"]

__getattr__, __dir__ = forward(__name__)


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Return whether an error is an out-of-memory error; for a RuntimeError, check its message."""
    says_so = isinstance(exception, RuntimeError) and " out of memory." in str(exception)
    return says_so or is_out_of_memory(exception)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Retry `function` with smaller batch sizes until it fits in memory.

    This is `headway.memory.find_executable_batch_size` with Accelerate's factor of 0.9.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        @wraps(function)
        def attempt(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                if should_reduce_batch_size(error):
                    raise torch.OutOfMemoryError(str(error)) from error
                raise

        return find_by_halving(attempt, starting_batch_size, reduce_batch_size_fn, factor=0.9)

    return decorate if function is None else decorate(function)
