"""What happens where memory runs out: which errors mean that, and smaller batches on all ranks."""

from __future__ import annotations

import inspect
import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial, wraps
from itertools import count
from typing import Any, NamedTuple, TypeVar, overload

import torch
import torch.distributed as dist

from headway.distributed.world import (
    default_store,
    form_group_again,
    group_device,
    rank_and_size,
)
from headway.errors import OutOfMemory, UsageError, WrongType
from headway.memory.device import clear_device_cache

T = TypeVar("T")

TEXTS = (  # parts of the messages of torch's RuntimeErrors, each with its source
    "out of memory",  # CUDA, HIP and MPS: c10/cuda/CUDACachingAllocator.cpp, MPSAllocator.mm
    "DefaultCPUAllocator: can't allocate memory",  # c10/core/impl/alloc_cpu.cpp
    "DefaultCPUAllocator: not enough memory",  # the same, on Windows
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN finds no algorithm that fits into what is left
    "CUDNN_STATUS_ALLOC_FAILED",  # cuDNN's own allocation
    "CUBLAS_STATUS_ALLOC_FAILED",  # cuBLAS's workspace
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` would not occur with a smaller batch: memory was used up."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in TEXTS)


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


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    factor: float = HALF,
) -> Any:
    """Call a function with smaller and smaller batch sizes until memory suffices.

    After an out-of-memory error the size is halved. All ranks use the same size: an error on one
    rank lowers it on all. A later call begins with the size that was found.

    Args:
        function: takes the batch size as its first argument. It makes the model, the optimizer and
            the loaders, and prepares them: each attempt begins with free memory. The first ranks
            that end an attempt wait for the others; those that wait for a rank whose memory ran
            out stop doing so, and the process group is formed anew.
        starting_batch_size: the first size to try.
        reduce_batch_size_fn: returns the next size to try, in place of `factor`; it takes no
            arguments, and returns the same on all ranks.
        factor: of the last size, rounded down, that is tried next; Accelerate's is 0.9.

    Returns:
        The decorated function, which takes all arguments but the first and returns what `function`
        returns; without `function` the decorator.

    Raises:
        OutOfMemory: the size has fallen to 0.
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
            ended = retry_on_all_ranks(partial(function, size, *args, **kwargs))
            if ended is not None:
                return ended.result
            before = size
            size = int(size * factor) if reduce_batch_size_fn is None else reduce_batch_size_fn()
            _check_falls(before, size)
        raise OutOfMemory(
            f"{function.__name__}() runs out of memory with every batch size: reached zero",
            where="the script's find_executable_batch_size(...)",
            fix="use a smaller model, shorter inputs, or a device with more memory",
        )

    return attempt


def _check_falls(before: int, size: int) -> None:
    if size >= before:
        raise UsageError(
            f"the batch size that follows {before}, for which memory ran out, is {size}",
            where="the script's find_executable_batch_size(...)",
            fix="pass a factor below 1, or a reduce_batch_size_fn whose sizes fall",
        )


def _check_arguments(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    parameters = inspect.signature(function).parameters
    if not parameters:
        raise WrongType(
            f"{function.__name__}() has no parameter for the batch size",
            where="the script's find_executable_batch_size(...)",
            fix=f"write `def {function.__name__}(batch_size):`",
        )
    takes_any = any(one.kind is one.VAR_POSITIONAL for one in parameters.values())
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


DONE, OUT_OF_MEMORY, CUT_OFF, FAILED = "done", "out of memory", "cut off", "failed"
GRACE_S = 5.0
"""How long a rank may go on once memory ran out on another. Then its connections are cut: it may be
waiting in a collective for that other rank."""
_FOREVER = timedelta(days=365)
_TCP = (socket.AF_INET, socket.AF_INET6)
_attempts = count()


class Ended(NamedTuple):
    """What an attempt returned that succeeded on every rank."""

    result: Any


def retry_on_all_ranks(function: Callable[[], Any]) -> Ended | None:
    """Call `function` on every rank; return its result, or None if memory ran out on any rank.

    A rank that waits in a collective for one whose memory ran out gets an error from it, and all
    ranks form the default process group anew. Other errors of `function` are passed on.
    """
    if rank_and_size()[1] == 1:
        return _attempt_alone(function)
    attempt = _Attempt(f"attempt/{next(_attempts)}")
    outcome, ended = FAILED, None
    try:
        ended = _attempt_alone(function)
        outcome = OUT_OF_MEMORY if ended is None else DONE
    except Exception:
        if not attempt.is_lost():
            raise
        outcome = CUT_OFF  # the error is a consequence: a peer is no longer there
    finally:
        outcomes = attempt.end(outcome)
    if CUT_OFF in outcomes:
        form_group_again(attempt.name)
    return None if {CUT_OFF, OUT_OF_MEMORY} & {*outcomes} else ended


def _attempt_alone(function: Callable[[], Any]) -> Ended | None:
    try:
        return Ended(function())
    except Exception as error:
        if is_out_of_memory(error):
            return None
        raise


class _Attempt:
    """What the ranks tell each other about one attempt.

    It goes through the store, not through collectives: those would be taken for the ones that
    other ranks are waiting in.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._rank, self._size = rank_and_size()
        self._store = self._connect()
        self._has_ended = threading.Event()
        addresses = [local for _, local, _ in _connections()]
        self._store.set(f"addresses/{self._rank}", json.dumps(addresses))
        self.watcher = threading.Thread(target=self._cut_when_lost, daemon=True)
        self.watcher.start()

    def _connect(self) -> dist.Store:
        """Return a connection to the store of its own: one that waits can do nothing else."""
        return dist.PrefixStore(self.name, default_store().clone())

    def is_lost(self) -> bool:
        """Return whether memory ran out on a rank."""
        return self._store.check(["lost"])

    def end(self, outcome: str) -> list[str]:
        """Say how this rank's attempt ended; wait for the others and return how theirs did."""
        self._has_ended.set()
        if outcome == OUT_OF_MEMORY:
            self._store.set("lost", "")
            self._store.set("over", "")
        keys = [f"outcome/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], outcome)
        if outcome == FAILED:
            return [outcome]
        self._store.wait(keys, _FOREVER)
        self._store.set("over", "")
        self.watcher.join()
        outcomes = [self._store.get(key).decode() for key in keys]
        self.let_others_read(outcomes)
        return outcomes

    def let_others_read(self, outcomes: list[str]) -> None:
        """Let rank 0, in whose process the store may be, go on once the others have read it.

        A rank that failed does not read it.
        """
        if self._rank > 0:
            self._store.set(f"read/{self._rank}", "")
            return
        others = [rank for rank, one in enumerate(outcomes) if rank > 0 and one != FAILED]
        self._store.wait([f"read/{rank}" for rank in others], _FOREVER)

    def _cut_when_lost(self) -> None:
        store = self._connect()
        store.wait(["over"], _FOREVER)
        if store.check(["lost"]) and not self._has_ended.wait(GRACE_S):
            keys = [f"addresses/{rank}" for rank in range(self._size)]
            _cut_connections({address for key in keys for address in json.loads(store.get(key))})


def _cut_connections(addresses: set[str]) -> None:
    """End this rank's connections to ranks at `addresses`: what waits for them gets an error."""
    if group_device().type != "cpu":  # pragma: needs a GPU
        dist.group.WORLD.abort()  # type: ignore[union-attr]
    for connection, _, remote in _connections():
        if remote in addresses:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _connections() -> Iterator[tuple[socket.socket, str, str]]:
    """Yield this process's TCP connections, with both addresses; not those of the store."""
    store = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    store_port = getattr(store, "port", None)
    for number in filter(_is_socket, map(int, os.listdir("/dev/fd"))):
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            local, remote = connection.getsockname(), connection.getpeername()
            if connection.family in _TCP and store_port not in (local[1], remote[1]):
                yield connection, f"{local[0]}:{local[1]}", f"{remote[0]}:{remote[1]}"


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:  # closed since it was listed
        return False
