"""Frees device memory, and retries with smaller batches after out-of-memory errors."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar, overload

import torch

from headway.devices.table import KINDS, extension_kinds
from headway.distributed.call_barrier import call_barrier
from headway.distributed.handler import checked
from headway.errors import Code, OutOfMemory, UsageError, WrongType

T = TypeVar("T")

_TEXTS = (  # of RuntimeErrors: torch has no exception types for these allocators
    "MPS backend out of memory",  # aten/src/ATen/mps/MPSAllocator.mm
    "DefaultCPUAllocator: can't allocate memory",  # c10/core/impl/alloc_cpu.cpp
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release the memory that torch caches on the GPU; a no-op without a GPU.

    Args:
        garbage_collection: run Python's garbage collector first, which is slow.

    Examples:
        >>> from headway.utils import clear_device_cache
        >>> clear_device_cache(garbage_collection=True)
    """
    if garbage_collection:
        gc.collect()
    for kind in (*KINDS.values(), *extension_kinds().values()):
        kind.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Release objects and their memory, as in `a, b = release_memory(a, b)`.

    Returns:
        One None per object, to assign to the variables that refer to the objects.

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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` is an out-of-memory error of torch or Python."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


CALL = "find_executable_batch_size(...)"
HALF = 0.5


@overload
def find_executable_batch_size(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    factor: float = HALF,
) -> Callable[[Callable[..., T]], Callable[..., T]]: ...


@overload
def find_executable_batch_size(
    function: Callable[..., T],
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    factor: float = HALF,
) -> Callable[..., T]: ...


@checked
def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    factor: float = HALF,
) -> Any:
    """Retry a function with smaller batch sizes until it fits in memory.

    After an out-of-memory error, the size is halved. All ranks use the same size: an error on one
    rank reduces the size on all ranks once they have all finished the attempt. If memory runs out
    on a rank while other ranks wait for it in a collective, the error is raised and the run fails.
    Later calls start with the last size that fit.

    Args:
        function: takes the batch size as its first argument. It should create and prepare the
            model, the optimizer and the loaders, because each attempt starts with freed memory.
        starting_batch_size: the first size to try.
        reduce_batch_size_fn: returns the next size to try, replacing `factor`; takes no arguments
            and must return the same value on all ranks.
        factor: after each failed attempt, the batch size is multiplied by this and rounded down;
            Accelerate uses 0.9.

    Returns:
        The decorated function, which takes the arguments of `function` except the batch size;
        without `function`, a decorator.

    Raises:
        OutOfMemory: the size has reached 0, or memory ran out while another rank waited for this
            rank.
        UsageError: the next size is not smaller than the previous size.
        WrongType: the batch size was passed to the decorated function, or `function` does not
            accept it.

    Examples:
        >>> import torch
        >>> from headway import find_executable_batch_size
        >>> @find_executable_batch_size(starting_batch_size=128)
        ... def train(batch_size, name):
        ...     if batch_size > 40:
        ...         raise torch.OutOfMemoryError("CUDA out of memory.")  # as a GPU would
        ...     return f"{name}: {batch_size} samples"
        >>> train("small")
        'small: 32 samples'
    """
    if function is None:
        return partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            factor=factor,
        )
    size = starting_batch_size

    @wraps(function)
    def attempt(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        _check_arguments(function, args)
        while size > 0:
            clear_device_cache(garbage_collection=True)
            result = attempt_on_all_ranks(partial(function, size, *args, **kwargs))
            if result is not None:
                return result[0]
            before = size
            size = int(size * factor) if reduce_batch_size_fn is None else reduce_batch_size_fn()
            if size >= before:
                raise UsageError(
                    f"memory ran out with batch size {before}, but the next, {size}, is not"
                    " smaller",
                    where=f"the script's {CALL}",
                    fix="pass a factor below 1, or a reduce_batch_size_fn with smaller sizes",
                    code=Code.BAD_ARGUMENT,
                )
        raise OutOfMemory(
            f"{function.__name__}() ran out of memory with every batch size above 0 that was tried",
            where=f"the script's {CALL}",
            fix="use a smaller model, shorter inputs, or a device with more memory",
            code=Code.OUT_OF_MEMORY,
        )

    return attempt


def _check_arguments(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    parameters = inspect.signature(function).parameters
    if not parameters:
        raise WrongType(
            f"{function.__name__}() has no parameter for the batch size",
            where=f"the script's {CALL}",
            fix=f"write `def {function.__name__}(batch_size):`",
            code=Code.WRONG_TYPE,
        )
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    if len(parameters) > len(args) or takes_any:
        return
    named = zip(list(parameters)[1:], args[1:], strict=False)
    call = ", ".join(f"{name}={value!r}" for name, value in named)
    raise WrongType(
        f"{function.__name__}() takes {len(parameters) - 1} arguments in addition to the batch"
        f" size, but {len(args)} were given",
        where=f"the script's call to {function.__name__}(...)",
        fix=f"omit the batch size: {function.__name__}({call})",
        code=Code.WRONG_TYPE,
    )


def attempt_on_all_ranks(function: Callable[[], Any]) -> tuple[Any] | None:
    """Return a 1-tuple of `function`'s result on this rank; None if memory ran out on any rank.

    The ranks agree once all have finished the attempt; other errors are raised immediately.
    """
    try:
        result: tuple[Any] | None = (function(),)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        result = None
    try:
        differ = call_barrier(CALL, "memory ran out" if result is None else "done")
    except UsageError as error:  # another rank waits for this rank in a collective
        if result is not None:
            raise
        raise OutOfMemory(
            f"memory ran out on this rank alone: {error.problems[0].what}",
            where=error.problems[0].where,
            fix="pass a smaller starting_batch_size: ranks can only retry together if memory runs"
            " out on all of them, or outside of collectives",
            code=Code.OUT_OF_MEMORY,
        ) from None
    return None if differ else result
