"""Loader workers that serve on when their rank is asked to stop, so that it can save; on Linux."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from multiprocessing import current_process, parent_process, resource_tracker
from multiprocessing.context import ForkProcess, SpawnProcess
from pathlib import Path
from threading import Thread
from typing import Any

from torch.utils.data import DataLoader

from headway.contract import signals
from headway.contract.progress import process_progress
from headway.data.samplers import changed
from headway.data.sharding import is_plain

_CHECK_RANK_S = 5.0  # as torch's workers do between two batches
_CAN_TELL_SENDERS = sys.platform == "linux"


def with_lasting_workers(loader: Any, *, will_save: bool = False) -> Any:
    """Return `loader`, whose workers outlive requests to stop if their rank saves then.

    Clusters send SIGTERM to every process of a job, and a terminal sends Ctrl-C to all of them: a
    rank could not complete its step without its workers. `will_save`: the rank will, by the time
    that a request may come, though it does not yet.
    """
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return loader
    if isinstance(loader.worker_init_fn, LastingWorker):
        return loader
    init = LastingWorker(loader.worker_init_fn, will_save)
    if is_plain(loader):
        return changed(loader, worker_init_fn=init)
    loader.worker_init_fn = init  # a copy would not be the object that its __iter__ may change
    return loader


@contextmanager
def starting_workers(loader: Any) -> Iterator[None]:
    """Let workers that `loader` starts in the block block requests to stop from the first on."""
    has_workers = getattr(loader, "num_workers", 0)
    if not (has_workers and _CAN_TELL_SENDERS and process_progress().will_save):
        yield
        return
    resource_tracker.ensure_running()  # unblocks signals when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _requests())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LastingWorker:
    """A `worker_init_fn` that lets the worker outlive requests to stop, and calls the script's own.

    A forked worker knows by itself whether its rank saves when it is asked to stop.
    """

    def __init__(self, init: Callable[[int], object] | None, will_save: bool = False) -> None:
        self._init, self._will_save = init, will_save

    def __reduce__(self) -> tuple[Any, ...]:
        return LastingWorker, (self._init, self._will_save or process_progress().will_save)

    def __call__(self, worker_id: int) -> None:
        if _CAN_TELL_SENDERS and (self._will_save or process_progress().will_save):
            _outlive_requests()
        if self._init is not None:
            self._init(worker_id)
        if _CAN_TELL_SENDERS and _is_orphan():
            os._exit(0)  # torch's worker takes its parent of now for its rank, and waits for ever


def _is_orphan() -> bool:
    """Return whether a worker's rank has ended; only a worker whose parent is the rank knows."""
    rank, is_child = parent_process(), isinstance(current_process(), (ForkProcess, SpawnProcess))
    return rank is not None and is_child and os.getppid() != rank.pid


def _requests() -> set[signal.Signals]:
    return {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}


def _outlive_requests() -> None:
    """In a worker, take no notice of signals to stop, unless they come from its rank.

    SIGTERM is blocked and awaited in a thread, because only so Python tells who has sent it. No
    process that the worker starts is to have it blocked. A worker some of whose threads do not
    block it, those of a fork server that has been running before, stays as torch has made it.
    """
    signals.outlive(*(_requests() - {signal.SIGTERM}))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _requests() - {signal.SIGTERM})
    if not all(map(_blocks_sigterm, Path("/proc/self/task").iterdir())):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return
    signals.outlive(signal.SIGTERM)  # while `_unblocked` starts a process
    os.register_at_fork(after_in_child=_end_by_sigterm)
    subprocess.Popen.__init__ = _unblocked(subprocess.Popen.__init__)  # type: ignore[method-assign]
    Thread(target=_end_with_rank, name="headway-end-with-rank", daemon=True).start()


def _blocks_sigterm(thread: Path) -> bool:
    status = (thread / "status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigBlk:")).split()[1]
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def _end_with_rank() -> None:
    """End this worker once its rank asks for it, or is gone."""
    rank = parent_process()
    assert rank is not None, "workers are started by multiprocessing"
    while True:
        request = signal.sigtimedwait({signal.SIGTERM}, _CHECK_RANK_S)
        is_asked = request is not None and request.si_pid == rank.pid
        if is_asked or not rank.is_alive():
            os._exit(0)  # as torch's own handler


def _end_by_sigterm() -> None:
    signals.do_as_usual(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _unblocked(start: Callable[..., None]) -> Callable[..., None]:
    """Return a function that starts a process in which SIGTERM is not blocked."""

    @wraps(start)
    def start_unblocked(*args: Any, **kwargs: Any) -> None:
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        try:
            start(*args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return start_unblocked
