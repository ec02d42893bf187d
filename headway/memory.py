"""The memory of a device: freed, and retries with smaller batches where it runs out."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar, overload

import torch

from headway.devices.table import KINDS, outside_kinds
from headway.distributed.handler import checked
from headway.distributed.meeting import meet
from headway.errors import OutOfMemory, UsageError, WrongType

T = TypeVar("T")

_TEXTS = (  # of RuntimeErrors: torch has no exception type for these two allocators
    "MPS backend out of memory",  # aten/src/ATen/mps/MPSAllocator.mm
    "DefaultCPUAllocator: can't allocate memory",  # c10/core/impl/alloc_cpu.cpp
)


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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether this is an out-of-memory error of torch or Python."""
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
    """Call a function with smaller and smaller batch sizes until memory suffices.

    After an out-of-memory error the size is halved. All ranks use the same size: when all have
    ended an attempt, an error on one rank lowers the size on all. If memory runs out on a rank for
    which others wait in a collective, the error is raised and the run ends. A later call starts
    with the size that was found.

    Args:
        function: takes the batch size as its first argument. It makes the model, the optimizer and
            the loaders, and prepares them: each attempt starts with free memory.
        starting_batch_size: the first size to try.
        reduce_batch_size_fn: returns the next size to try, in place of `factor`; it takes no
            arguments, and returns the same on all ranks.
        factor: of the last size, rounded down, that is tried next; Accelerate's is 0.9.

    Returns:
        The decorated function, which takes all arguments but the first and returns what `function`
        returns; without `function` the decorator.

    Raises:
        OutOfMemory: the size has fallen to 0, or memory ran out while another rank waited for
            this one.
        UsageError: the next size is no smaller than the one before.
        WrongType: the decorated function was given the batch size, too, or does not take it.

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
            ended = attempt_on_all_ranks(partial(function, size, *args, **kwargs))
            if ended is not None:
                return ended[0]
            before = size
            size = int(size * factor) if reduce_batch_size_fn is None else reduce_batch_size_fn()
            _check_falls(before, size)
        raise OutOfMemory(
            f"{function.__name__}() runs out of memory with every batch size: reached zero",
            where=f"the script's {CALL}",
            fix="use a smaller model, shorter inputs, or a device with more memory",
        )

    return attempt


def _check_falls(before: int, size: int) -> None:
    if size >= before:
        raise UsageError(
            f"the batch size that follows {before}, for which memory ran out, is {size}",
            where=f"the script's {CALL}",
            fix="pass a factor below 1, or a reduce_batch_size_fn whose sizes fall",
        )


def _check_arguments(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    parameters = inspect.signature(function).parameters
    if not parameters:
        raise WrongType(
            f"{function.__name__}() has no parameter for the batch size",
            where=f"the script's {CALL}",
            fix=f"write `def {function.__name__}(batch_size):`",
        )
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    if len(parameters) > len(args) or takes_any:
        return
    named = zip(list(parameters)[1:], args[1:], strict=False)
    call = ", ".join(f"{name}={value!r}" for name, value in named)
    raise WrongType(
        f"{function.__name__}() got {len(args)} arguments besides the batch size, which it takes"
        f" {len(parameters) - 1} of",
        where=f"the script's call of {function.__name__}(...)",
        fix=f"leave the batch size out: {function.__name__}({call})",
    )


def attempt_on_all_ranks(function: Callable[[], Any]) -> tuple[Any] | None:
    """Return a tuple of what `function` returns on this rank; None if memory ran out on any.

    The ranks agree when all have ended the attempt; errors other than out of memory are raised.
    """
    try:
        ended: tuple[Any] | None = (function(),)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        ended = None
    try:
        differ = meet(CALL, "memory ran out" if ended is None else "done")
    except UsageError as error:  # another rank waits in a collective for this one
        if ended is not None:
            raise
        raise OutOfMemory(
            f"memory ran out on this rank alone: {error.problems[0].what}",
            where=error.problems[0].where,
            fix="pass a smaller starting_batch_size: ranks can only try the next size together if"
            " memory runs out on all of them, or where no other rank waits for this one",
        ) from None
    return None if differ else ended
