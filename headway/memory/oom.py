"""Which exceptions mean that a device or the machine has no memory left."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from headway.distributed.world import (
    default_store,
    form_group_again,
    group_device,
    rank_and_size,
)

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
