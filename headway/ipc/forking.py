"""What a process that forks others needs: it hears of their ends, and they end with it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from headway.ipc import signals

_FIXED_IN = {(3, 10): 15, (3, 11): 10}  # of these Pythons; newer ones never had it
_SETTLED_WITHIN_S = 0.05
_PR_SET_PDEATHSIG = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER = 36


_monotonic, _sleep = time.monotonic, time.sleep  # a script may replace them
_settles = False


def quiesce_before_fork() -> None:
    """Make each fork of this process wait until only its Python threads run.

    Another thread may start to call Python, as gloo's do to drop a tensor after a collective.
    Before Python 3.10.15 and 3.11.10 a child that is forked at this moment, such as a loader's
    worker, hangs forever. Linux only; waits for a busy thread for up to 50 ms.
    Source: https://github.com/python/cpython/issues/112275
    """
    global _settles
    if not _settles and sys.version_info[2] < _FIXED_IN.get(sys.version_info[:2], 0):
        os.register_at_fork(before=_settle)
    _settles = True


def _settle() -> None:
    import threading

    deadline = _monotonic() + _SETTLED_WITHIN_S
    pythons = {str(getattr(thread, "native_id", None)) for thread in threading.enumerate()}
    # the main thread has its parent's number in `threading` after a fork; this one may not be there
    pythons |= {str(os.getpid()), str(threading.get_native_id())}
    with suppress(OSError):  # not Linux
        while _any_runs({*os.listdir("/proc/self/task")} - pythons) and _monotonic() < deadline:
            _sleep(0.0002)


def _any_runs(threads: set[str]) -> bool:
    """Return whether one of these threads runs, or waits for a core. Source: proc(5)."""
    for thread in threads:
        with suppress(OSError), open(f"/proc/self/task/{thread}/stat", "rb") as file:
            if file.read().rpartition(b") ")[2][:1] in (b"R", b"D"):
                return True
    return False


def init_forked(parent: int, streams: Sequence[int]) -> None:
    """Set up a process that was just forked: it has its own session, and ends with its parent.

    `streams` become its stdin, stdout and stderr.
    """
    die_with_parent(parent)
    os.setsid()
    signal.set_wakeup_fd(-1)
    signals.reset_handlers(signal.SIGCHLD)
    for target, fd in enumerate(streams):
        os.dup2(fd, target)
        os.close(fd)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; exit if it has died already.

    A fork clears this, so every process calls it; an exec keeps it. Linux only; elsewhere it does
    nothing. Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) and os.getppid() != parent:
        os._exit(1)


def resume_on_parent_exit() -> None:
    """Make the kernel resume this process, if it is suspended, when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def adopt_orphans() -> bool:
    """Become the parent of descendants whose parent ends; return whether the system supports it.

    Linux only. Source: prctl(2), PR_SET_CHILD_SUBREAPER.
    """
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> bool:
    if "linux" not in sys.platform:
        return False
    import ctypes

    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)


def wake_on_child_end() -> tuple[int, int]:
    """Return a pipe whose first end is readable once a child has ended.

    The second end is the interpreter's: see `signal.set_wakeup_fd`.
    """
    reading, writing = os.pipe()
    for fd in (reading, writing):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signals.outlive(signal.SIGCHLD)
    return reading, writing


def reap() -> Iterator[tuple[int, int]]:
    """Yield pid and wait status of each child that has ended; ChildProcessError if none is left."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        yield pid, status


def set_title(title: str) -> None:
    """Overwrite this process's arguments with `title`, which `ps` then shows.

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
    """A process of another parent, by its descriptor, or by its pid and start time."""

    def __init__(self, pid: int) -> None:
        self._fd: int | None = None
        self.process = None
        try:
            self._fd = os.pidfd_open(pid)
        except (AttributeError, OSError):  # not on Linux; an old kernel, a sandbox
            import psutil

            with suppress(psutil.NoSuchProcess):
                self.process = psutil.Process(pid)

    def send(self, number: int) -> None:
        """Send a signal; does nothing once the process has ended."""
        fd, process = self._fd, self.process  # another thread may close the handle meanwhile
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
