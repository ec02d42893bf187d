"""What a process that forks others needs: it hears of their ends, and they end with it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence

from headway.contract import signals

_PR_SET_PDEATHSIG = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER = 36


def become_new(parent: int, streams: Sequence[int]) -> None:
    """Set up a process that was just forked: it has a session of its own, and ends with its parent.

    Args:
        parent: the process that it was forked from.
        streams: what becomes its stdin, stdout and stderr.
    """
    die_with_parent(parent)
    os.setsid()
    signal.set_wakeup_fd(-1)
    signals.do_as_usual(signal.SIGCHLD)
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


def resume_with_parents_end() -> None:
    """Ask the kernel to let this process, where it is suspended, go on when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def adopt_orphans() -> bool:
    """Become the parent of descendants whose own parent ends; return whether the system can.

    Linux only. Source: prctl(2), PR_SET_CHILD_SUBREAPER.
    """
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> bool:
    if "linux" not in sys.platform:
        return False
    import ctypes

    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)


def wake_on_child_end() -> tuple[int, int]:
    """Return a pipe of which the first end is readable once a child has ended.

    The second end is the interpreter's: see `signal.set_wakeup_fd`.
    """
    reading, writing = os.pipe()
    for fd in (reading, writing):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signals.outlive(signal.SIGCHLD)
    return reading, writing


def reap() -> Iterator[tuple[int, int]]:
    """Yield the pid and the wait status of each child that has ended.

    Raises:
        ChildProcessError: no child is left.
    """
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        yield pid, status
