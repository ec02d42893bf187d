"""Helpers for forking: wake up when a child exits, and kill children when their parent dies."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache

from headway.ipc import signals

_FIRST_FIXED_PATCH = {(3, 10): 15, (3, 11): 10}  # first patch releases without the hang
_IDLE_TIMEOUT_S = 0.05  # the longest wait of a fork for busy threads
_PR_SET_PDEATHSIG = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER = 36

_monotonic, _sleep = time.monotonic, time.sleep  # a script may replace them


@cache
def quiesce_before_fork() -> None:
    """Delay every fork in this process until its non-Python threads are idle.

    In Python versions before 3.10.15 and 3.11.10, a child such as a DataLoader worker hangs forever
    if it is forked while another thread enters Python, as gloo's threads do to free a tensor after
    a collective. A fork waits at most 50 ms for busy threads. Outside Linux, this has no effect.
    Source: https://github.com/python/cpython/issues/112275
    """
    if sys.version_info[2] < _FIRST_FIXED_PATCH.get(sys.version_info[:2], 0):
        os.register_at_fork(before=_wait_for_idle_threads)


def _wait_for_idle_threads() -> None:
    import threading

    deadline = _monotonic() + _IDLE_TIMEOUT_S
    own_ids = {str(getattr(thread, "native_id", None)) for thread in threading.enumerate()}
    # after a fork, `threading` has the parent's id for the main thread, and may omit this thread
    own_ids |= {str(os.getpid()), str(threading.get_native_id())}
    with suppress(OSError):  # not Linux
        while _any_running({*os.listdir("/proc/self/task")} - own_ids) and _monotonic() < deadline:
            _sleep(0.0002)


def _any_running(threads: set[str]) -> bool:
    """Return whether any of `threads` is running or runnable. Source: proc(5)."""
    for thread in threads:
        with suppress(OSError), open(f"/proc/self/task/{thread}/stat", "rb") as file:
            if file.read().rpartition(b") ")[2][:1] in (b"R", b"D"):
                return True
    return False


def init_child(parent: int, streams: Sequence[int]) -> None:
    """Start a new session in a forked child, and kill the child when its parent dies.

    `streams` become stdin, stdout and stderr.
    """
    die_with_parent(parent)
    os.setsid()
    signal.set_wakeup_fd(-1)
    signals.reset_handlers(signal.SIGCHLD)
    for target, fd in enumerate(streams):
        os.dup2(fd, target)
        os.close(fd)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; exit if the parent is already dead.

    A fork clears this setting, so each child must call the function; an exec keeps the setting.
    Outside Linux, the function has no effect. Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) and os.getppid() != parent:
        os._exit(1)


def resume_on_parent_exit() -> None:
    """Ask the kernel to resume this process, if it is suspended, when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def adopt_orphans() -> bool:
    """Become the parent of orphaned descendants; return False if the system does not support this.

    Only Linux supports it. Source: prctl(2), PR_SET_CHILD_SUBREAPER.
    """
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> bool:
    if "linux" not in sys.platform:
        return False
    import ctypes

    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)


def wake_on_child_exit() -> tuple[int, int]:
    """Return a pipe whose read end becomes readable when a child exits.

    The interpreter writes to the write end; see `signal.set_wakeup_fd`.
    """
    reading, writing = os.pipe()
    for fd in (reading, writing):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signals.ignore_until_exec(signal.SIGCHLD)
    return reading, writing


def reap() -> Iterator[tuple[int, int]]:
    """Yield (pid, wait status) for each exited child; raise ChildProcessError if none is left."""
    while (child := os.waitpid(-1, os.WNOHANG)) != (0, 0):
        yield child


def set_title(title: str) -> None:
    """Set the title that `ps` shows for this process, by overwriting its arguments.

    Source: proc(5), /proc/pid/stat fields 48 and 49 (arg_start, arg_end).
    """
    import ctypes

    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
    except (OSError, ValueError, IndexError):
        return
    if end > start:
        text = title.encode(errors="surrogateescape")[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


class ProcessHandle:
    """A handle to a process that is not a child: a pidfd, or the process's pid and start time."""

    def __init__(self, pid: int) -> None:
        self._fd: int | None = None
        self.process = None
        try:
            self._fd = os.pidfd_open(pid)
        except (AttributeError, OSError):  # not Linux, an old kernel or a sandbox
            import psutil

            with suppress(psutil.NoSuchProcess):
                self.process = psutil.Process(pid)

    def send(self, number: int) -> None:
        """Send a signal, unless the process has exited."""
        fd, process = self._fd, self.process  # another thread may close the handle
        if fd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)
        elif process is not None:
            import psutil

            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def close(self) -> None:
        fd, self._fd, self.process = self._fd, None, None
        if fd is not None:
            os.close(fd)
