"""Answers the launcher's status requests in a thread of each rank, without affecting the script.

The thread reads the stacks of all threads and torch's flight recorder, which lists the collectives
that this rank has entered. The thread needs the GIL, which C code may hold. This module does not
import torch.
"""

from __future__ import annotations

import _thread
import faulthandler
import fcntl
import os
import resource
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import islice
from traceback import walk_stack
from types import FrameType
from typing import Any

from headway.ipc import process_groups
from headway.ipc.process_groups import prefix_group_stores
from headway.ipc.progress import Channel, Progress, identity, process_progress
from headway.ipc.records import Frame, Group, RankReady, StatusReply
from headway.ipc.run_contract import port_of_store
from headway.launcher.rank.import_hooks import call_after_import

_C10D = "torch.distributed.distributed_c10d"
_MAX_FRAMES = 200  # per thread, in a reply
_NUM_RESERVED_FDS = 8  # at the upper end of the allowed range
_PAUSED_WITHIN_S = 0.5  # limit on a fork's wait for the thread to exit

_MAIN_THREAD = threading.main_thread().ident or 0
_monotonic, _sleep = time.monotonic, time.sleep  # a script may replace them


def start(channel: int) -> None:
    """Open the status channel, start the thread that answers on it, and enable faulthandler."""
    # a script may close low descriptors that it did not open, and reuse their numbers
    channel = _move_to_high_number(channel)
    progress = process_progress()
    progress.connect(Channel(channel))
    if not faulthandler.is_enabled():
        faulthandler.enable(2, all_threads=False)
    monitor = _MonitorThread(channel, progress)
    monitor.start()
    os.register_at_fork(before=monitor.pause, after_in_parent=monitor.resume)
    progress.send(RankReady())
    call_after_import(_C10D, partial(prefix_group_stores, port=port_of_store()))


def _move_to_high_number(fd: int) -> int:
    """Return a duplicate of `fd` near the limit on open files, and close `fd`."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, min(limit, 65536) - _NUM_RESERVED_FDS)
    except OSError:
        return fd
    os.close(fd)
    return moved


class _MonitorThread:
    """The thread that answers status requests.

    It blocks all signals, so that they interrupt the main thread's calls. It is stopped while this
    process forks, because Python warns if a process with several threads forks, and the child
    would get copies of the locks that the thread holds.
    """

    def __init__(self, channel: int, progress: Progress) -> None:
        self._channel, self._progress = channel, progress
        self._wake_read, self._wake_write = map(_move_to_high_number, os.pipe())
        os.set_blocking(self._wake_read, False)
        self._wake_identity = identity(self._wake_write)
        self._generation = 0  # of the thread; older threads exit
        self._ended = _thread.allocate_lock()  # released when the thread has exited
        self._thread_id = 0  # the kernel's id
        self._num_forks = 0  # forks in progress, in any thread
        self._forking = _thread.RLock()  # not a Lock: a signal handler may fork while this is held

    def start(self) -> None:
        """Start the thread, which exits when the launcher or this process exits."""
        self._ended = _thread.allocate_lock()
        self._ended.acquire()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            _thread.start_new_thread(self._serve, (self._generation, self._ended))
        except RuntimeError:  # the process limit is reached, or Python is exiting
            self._ended.release()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def pause(self) -> None:
        """Stop the thread before a fork; return even if it does not exit before the deadline."""
        if not self._is_intact():
            return
        with self._forking:
            self._num_forks += 1
            if self._num_forks > 1:
                return
            self._generation += 1
            os.write(self._wake_write, b"\0")
            deadline = _monotonic() + _PAUSED_WITHIN_S
            if self._ended.acquire(timeout=_PAUSED_WITHIN_S):
                task = f"/proc/self/task/{self._thread_id}"
                while os.path.exists(task) and _monotonic() < deadline:
                    _sleep(0.0001)  # it has released the lock, and is about to exit

    def resume(self) -> None:
        """Start the thread again after a fork, in the parent."""
        if not self._is_intact():  # such as in a child that itself forks
            return
        with self._forking:
            if self._num_forks:
                self._num_forks -= 1
                if not self._num_forks:
                    self.start()

    def _serve(self, generation: int, ended: Any) -> None:
        self._thread_id = _thread.get_native_id()
        with suppress(Exception):  # errors here must not affect the script
            poll = select.poll()
            poll.register(self._channel, select.POLLIN)
            poll.register(self._wake_read, select.POLLIN)
            while generation == self._generation and self._is_intact():
                ready = {fd for fd, _ in poll.poll()}
                if not self._is_intact():
                    break
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                elif not os.read(self._channel, 4096):  # the launcher has exited
                    break
                else:
                    _answer(self._progress)
        ended.release()

    def _is_intact(self) -> bool:
        """Return whether this process still has the channel and the pipe."""
        return self._progress.is_connected and identity(self._wake_write) == self._wake_identity


def _answer(progress: Progress) -> None:
    groups: tuple[Group, ...] = ()
    with suppress(Exception):  # torch's private names may have changed
        groups = read_groups()
    progress.send(
        StatusReply(
            groups=groups,
            progress=progress.snapshot(),
            num_modules=len(sys.modules),
            stacks=_read_stacks(progress.own_threads),
            may_be_killed=progress.may_be_killed(),
        )
    )


def _read_stacks(own_threads: set[int]) -> tuple[tuple[Frame, ...], ...]:
    """Return the stacks of the script's threads, starting with the main thread."""
    frames = sys._current_frames()
    for own in (_thread.get_ident(), *own_threads):
        frames.pop(own, None)
    return tuple(_calls(frames[tid]) for tid in sorted(frames, key=lambda tid: tid != _MAIN_THREAD))


def _calls(frame: FrameType) -> tuple[Frame, ...]:
    """Return the calls that lead to `frame`, with the most recent call last."""
    calls = islice(walk_stack(frame), _MAX_FRAMES)
    stack = [Frame(of.f_code.co_filename, line or 0, of.f_code.co_name) for of, line in calls]
    return tuple(reversed(stack))


def read_groups() -> tuple[Group, ...]:
    """Return this rank's process groups, plus a group with the runtime's own collective calls."""
    calls = sys.modules.get("headway.distributed.call_barrier")
    return (*(calls.last_barrier() if calls is not None else ()), *process_groups.read_groups())
