"""Loader workers that outlive a stop signal while their rank handles it, so that it can save."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import current_process, parent_process, resource_tracker
from multiprocessing.context import ForkProcess, SpawnProcess
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.utils.data import DataLoader

from headway.data.generators import snapshot
from headway.data.script_loaders import changed, is_plain
from headway.ipc import signals

_REQUESTS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}
_HAS_PROC = sys.platform == "linux"
_CHILD_OF_RANK = ForkProcess, SpawnProcess  # and not of a server


def with_shielded_workers(loader: Any, *, notes_draws: bool = False) -> Any:
    """Return `loader`, whose workers outlive requests to stop while their rank handles SIGTERM.

    Clusters send SIGTERM to every process of a job, and a terminal sends Ctrl-C to all of them: a
    rank could not complete its step without its workers.
    """
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return loader
    if isinstance(loader.worker_init_fn, ShieldedWorker):
        return loader
    # before multiprocessing sends SIGTERM to workers that are left at the rank's exit
    Finalize(None, signals.ignore, (signal.SIGTERM,), exitpriority=0)
    init = ShieldedWorker(loader.worker_init_fn)
    if is_plain(loader):
        collate = init.noting(loader.collate_fn) if notes_draws else loader.collate_fn
        return changed(loader, worker_init_fn=init, collate_fn=collate)
    loader.worker_init_fn = init  # a copy would not be the object that its __iter__ may change
    return loader


@contextmanager
def starting_workers(loader: Any) -> Iterator[None]:
    """Block requests to stop in workers that start in the block, until they have handlers."""
    num_workers = getattr(loader, "num_workers", 0)
    if not (num_workers and _HAS_PROC and callable(signal.getsignal(signal.SIGTERM))):
        yield
        return
    resource_tracker.ensure_running()  # unblocks signals when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _REQUESTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ShieldedWorker:
    """A `worker_init_fn` that handles requests to stop in the worker, and calls the script's."""

    def __init__(self, init: Callable[[int], object] | None) -> None:
        self._init = init
        self._states: Any = None
        self._has_drawn = torch.zeros((), dtype=torch.bool)

    @property
    def has_drawn(self) -> bool:
        """Whether the random generators of a worker have moved."""
        return bool(self._has_drawn)

    def noting(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return `collate` in a form that notes whether the generators of its worker have moved."""
        self._has_drawn.share_memory_()  # type: ignore[no-untyped-call]
        return partial(self._collate, collate)

    def _collate(self, collate: Callable[[Any], Any], samples: Any) -> Any:
        batch = collate(samples)
        if self._states is not None and not self._has_drawn:
            self._has_drawn.fill_(snapshot() != self._states)
        return batch

    def __call__(self, worker_id: int) -> None:
        if _HAS_PROC:
            signals.trap(_end_unless_rank_saves, signal.SIGTERM)
            signals.outlive(signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _REQUESTS)
        if self._init is not None:
            self._init(worker_id)
        rank, is_child = parent_process(), isinstance(current_process(), _CHILD_OF_RANK)
        if _HAS_PROC and rank is not None and is_child and os.getppid() != rank.pid:
            os._exit(0)  # torch's worker takes its parent of now for its rank, and waits for ever
        self._states = snapshot()


def _end_unless_rank_saves(*_: object) -> None:
    """End this worker on SIGTERM, unless its rank handles the signal.

    A rank that ignores it is about to exit; torch takes any other exit code for a crash then.
    """
    rank = parent_process()
    assert rank is not None, "workers are started by multiprocessing"
    if _has(rank.pid, "SigCgt"):
        return
    if _has(rank.pid, "SigIgn"):
        os._exit(0)
    signals.reset_handlers(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


def _has(pid: int | None, mask: str) -> bool:
    """Return whether SIGTERM is in a process's signal mask. Source: proc(5), /proc/pid/status."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            row = next(line for line in status if line.startswith(mask))
    except OSError:  # it has ended
        return False
    return bool(int(row.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
