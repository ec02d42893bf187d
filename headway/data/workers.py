"""Keep loader workers alive after a stop signal that their rank handles, so the rank can save."""

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

_REQUESTS = {*signals.PREEMPTION_SIGNALS}
_HAS_PROC = sys.platform == "linux"
_CHILD_OF_RANK = ForkProcess, SpawnProcess  # not children of a fork server


def with_shielded_workers(loader: Any, *, records_draws: bool = False) -> Any:
    """Return `loader` with workers that survive stop signals while their rank handles SIGTERM.

    Clusters send SIGTERM, and terminals SIGINT, to every process of a job, but a rank cannot
    complete its step without its workers.
    """
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return loader
    if isinstance(loader.worker_init_fn, ShieldedWorker):
        return loader
    # runs before multiprocessing sends SIGTERM to remaining workers at the rank's exit
    Finalize(None, signals.trap, (signal.SIG_IGN, signal.SIGTERM), exitpriority=0)
    init = ShieldedWorker(loader.worker_init_fn)
    if is_plain(loader):
        collate = init.recording_draws(loader.collate_fn) if records_draws else loader.collate_fn
        return changed(loader, worker_init_fn=init, collate_fn=collate)
    loader.worker_init_fn = init  # no copy: its __iter__ may modify the object
    return loader


@contextmanager
def starting_workers(loader: Any) -> Iterator[None]:
    """Mask stop signals in workers that the `with` block starts, until they have set handlers."""
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
    """A `worker_init_fn` that sets signal handlers, then calls the script's `worker_init_fn`."""

    def __init__(self, init: Callable[[int], object] | None) -> None:
        self._init = init
        self._states: Any = None
        self.has_drawn = torch.zeros((), dtype=torch.bool)  # random numbers, in any worker

    def recording_draws(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `collate` to record whether its worker has drawn random numbers."""
        self.has_drawn.share_memory_()  # type: ignore[no-untyped-call]
        return partial(self._collate, collate)

    def _collate(self, collate: Callable[[Any], Any], samples: Any) -> Any:
        batch = collate(samples)
        if self._states is not None and not self.has_drawn:
            self.has_drawn.fill_(snapshot() != self._states)
        return batch

    def __call__(self, worker_id: int) -> None:
        if _HAS_PROC:
            signals.trap(_exit_unless_rank_saves, signal.SIGTERM)
            signals.ignore_until_exec(*_REQUESTS - {signal.SIGTERM})
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _REQUESTS)
        if self._init is not None:
            self._init(worker_id)
        rank, is_child = parent_process(), isinstance(current_process(), _CHILD_OF_RANK)
        if _HAS_PROC and rank is not None and is_child and os.getppid() != rank.pid:
            os._exit(0)  # torch's worker would wait forever, mistaking its new parent for its rank
        self._states = snapshot()


def _exit_unless_rank_saves(*_: object) -> None:
    """Terminate this worker on SIGTERM unless its rank handles the signal.

    If the rank ignores SIGTERM, it is exiting. The worker then exits with 0, because torch reports
    a nonzero exit code as a crash.
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
    """Return whether a process's signal mask includes SIGTERM; see proc(5), /proc/pid/status."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            row = next(line for line in status if line.startswith(mask))
    except OSError:  # the process has exited
        return False
    return bool(int(row.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
