"""Ends processes that would outlive their launcher."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

_PR_SET_PDEATHSIG = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER = 36
_MIN_GRACE_S = 2.0


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; exit if it has died already.

    A fork clears this, so every process calls it. Linux only; elsewhere it does nothing.
    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) and os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends.

    Linux only; elsewhere it does nothing. Source: prctl(2), PR_SET_CHILD_SUBREAPER.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> bool:
    if "linux" not in sys.platform:
        return False
    import ctypes

    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)


def end_descendants(grace_s: float) -> None:
    """End all descendants: SIGTERM, then SIGKILL after `grace_s` (at least two) seconds."""
    import psutil

    me = psutil.Process()
    deadline = time.monotonic() + max(grace_s, _MIN_GRACE_S)
    asked: set[int] = set()
    while below := [one for one in me.children(recursive=True) if _runs(one)]:
        late = time.monotonic() > deadline
        for one in below:
            if late or one.pid not in asked:
                asked.add(one.pid)
                with suppress(psutil.Error):
                    one.send_signal(signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.05)
        _reap_all()


def _runs(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _reap_all() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
