"""Writes checkpoints in a background thread, from copies of the tensors."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from itertools import count
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from headway.checkpoint.saving import Prepared, agree, remove_on_failure, write_prepared
from headway.checkpoint.tensors import local_part
from headway.devices.table import kind_of
from headway.distributed.call_barrier import call_barrier
from headway.distributed.world import before_leaving, group_timeout, rank_and_size
from headway.errors import HeadwayError
from headway.ipc import signals
from headway.ipc.progress import WRITER
from headway.ipc.stderr import flush_streams, log

_MANY_TENSORS = 256  # fewer are written in less time than the pauses would add
_FLUSHES = 64  # between two pauses: after each pause, the processor's caches are cold
_PAUSE_S = 0.005  # per flush, of which a tensor needs two: 4% of the time with Python's lock


class Background:
    """Writes one checkpoint at a time in the background; all ranks must call `start` and `wait`.

    The copies of the tensors are kept, so that the next checkpoint can reuse their memory.

    Forks, such as those of loader workers, are delayed until the first checkpoint is written. When
    a torch operator runs for the first time, it registers a destructor while holding a lock of the
    C library. A process forked at this moment would wait for the lock forever (glibc 2.36,
    `__exit_funcs_lock`).
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._written = threading.Event()  # set by the writing thread
        self._is_awaited = threading.Event()  # the writing thread does not pause any more
        self._failure: Exception | None = None
        self._copies: dict[str, torch.Tensor] = {}
        self._group: dist.ProcessGroup | None = None
        self._group_of: object = None  # the default group when `_group` was created
        self._first: threading.Thread | None = None

    def start(self, prepared: Prepared) -> None:
        """Copy the tensors and start writing; the previous checkpoint must be complete."""
        with remove_on_failure(prepared.pending):
            staged = prepared._replace(tensors=agree(lambda: self._copy(prepared.tensors)))
            group = self._own_group()
        self._written.clear()
        self._is_awaited.clear()
        thread = threading.Thread(target=self._write, args=(staged, group), name=WRITER)
        thread.daemon = True  # at exit, Python joins other threads, and a signal would kill it then
        thread.start()
        self._thread = thread
        before_leaving[self._join] = None
        atexit.unregister(self.end)
        atexit.register(self.end)  # re-register, to run before other exit handlers
        if self._first is None:
            self._first = self._thread
            join = WeakMethod(self.join_first)  # the fork hook must not keep this object alive
            os.register_at_fork(before=lambda: (join() or bool)())

    def wait(self) -> None:
        """Wait until the checkpoint is written; if a rank failed, raise its error on all ranks."""
        if self._thread is not None:
            call_barrier("wait_for_checkpoint()")
            self._join()
            self._thread = None
            agree(self._raise_failure)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for the write on this rank only, deferring signals, and free the copies."""
        self._join_deferring_signals()
        self._thread = None
        self._copies.clear()
        atexit.unregister(self.end)
        before_leaving.pop(self._join, None)
        self._raise_failure()

    def _write(self, prepared: Prepared, group: dist.ProcessGroup | None) -> None:
        flushes, is_large = count(1), len(prepared.tensors) > _MANY_TENSORS

        def pause() -> None:
            if is_large and next(flushes) % _FLUSHES == 0:
                self._is_awaited.wait(_FLUSHES * _PAUSE_S)

        try:
            write_prepared(prepared, group, pause)
        except Exception as error:  # noqa: BLE001  raised when the script waits
            self._failure = error
        finally:
            self._written.set()

    def join_first(self) -> None:
        """Wait until the first checkpoint is written, unless this is the writing thread."""
        if self._first is self._thread and self._first is not threading.current_thread():
            self._join()

    def _join(self) -> None:
        if self._thread is not None and self._thread.is_alive():  # false in a forked process
            self._is_awaited.set()
            self._written.wait()  # an interrupted join() marks the thread as finished (Python 3.11)
            self._thread.join()

    def _join_deferring_signals(self) -> None:
        try:
            with signals.collect_signals(*signals.PREEMPTION_SIGNALS) as received:
                self._join()
        except KeyboardInterrupt:  # second Ctrl-C
            os._exit(128 + signal.SIGINT)
        for number in received:
            signal.raise_signal(number)

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        before, self._copies = self._copies, {}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # several threads would wait for each other on busy cores
        try:
            for name, tensor in tensors.items():
                self._copies[name] = _copied(tensor, before.pop(name, None))
        finally:
            torch.set_num_threads(threads)
        for name in {tensor.device.type for tensor in tensors.values()}:
            kind_of(name).synchronize()
        return self._copies

    def _own_group(self) -> dist.ProcessGroup | None:
        """Return a process group that training does not use; None with one rank."""
        if rank_and_size()[1] == 1:
            return None
        if self._group_of is not dist.group.WORLD:
            self._group = dist.new_group(backend="gloo", timeout=group_timeout())
            self._group_of = dist.group.WORLD
        return self._group

    def end(self) -> None:
        """Wait for the write at exit; after a failure or Ctrl-C, exit with an error code."""
        code = 0
        try:
            self._join_deferring_signals()
        except KeyboardInterrupt:  # Python ignores it in exit handlers
            code = 128 + signal.SIGINT
        atexit.unregister(self.end)
        if self._failure is not None:
            fail_at_exit(self._failure)
        if code:
            _exit_with(code)


def fail_at_exit(error: Exception) -> None:
    """Exit with the error's code; called in exit handlers, where Python ignores raised errors."""
    if isinstance(error, HeadwayError):
        print(f"error: {error}", file=sys.stderr, flush=True)
        _exit_with(error.exit_code)
    if getattr(sys, "last_type", None) is None:
        traceback.print_exception(error)
    else:  # usually, another rank has caused both errors
        log(f"note: the checkpoint was not written: {type(error).__name__}: {error}")
    _exit_with(1)


def _copied(tensor: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """Copy a tensor to the CPU; if an earlier copy, `before`, has the same layout, reuse it."""
    own = before
    if own is None or _layout(own) != _layout(tensor):
        is_pinned = tensor.is_cuda and not isinstance(tensor, DTensor)
        own = torch.empty_like(
            tensor, device="cpu", pin_memory=is_pinned, memory_format=torch.contiguous_format
        )
    local_part(own).copy_(local_part(tensor), non_blocking=True)
    return own


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return tensor.shape, tensor.dtype, placements


def _exit_with(code: int) -> None:
    """Exit with the given code when called from an exit handler, after running the other handlers.

    Python ignores SystemExit in exit handlers. This relies on a private function of atexit that
    multiprocessing also uses. Handlers registered after the calling handler run twice.
    """
    atexit._run_exitfuncs()
    flush_streams()
    os._exit(code)
