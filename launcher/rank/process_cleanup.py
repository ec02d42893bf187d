"""Ends processes that would outlive their launcher."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from headway.contract.forking import reap

if TYPE_CHECKING:
    from psutil import Process

_MIN_GRACE_S = 2.0
_POLL_S = 0.05
_USUAL_MAX = 2**15  # number of a process: PID_MAX_DEFAULT of Linux
_MAX_NUMBER = 2**22  # PID_MAX_LIMIT

KILL_MARGIN_S = 10.0
"""How long the kernel may take to end a process after SIGKILL; then nobody waits for it."""


def has_children() -> bool:
    """Reap the children that have ended, and return whether any is left."""
    with suppress(ChildProcessError):
        for _ in reap():
            pass
        return True
    return False


def end_descendants(grace_s: float) -> None:
    """End all descendants: SIGTERM, then SIGKILL after `grace_s` (at least two) seconds.

    This process adopts orphans: it has children as long as it has descendants, also while they
    fork.
    """
    if has_children():  # importing psutil takes as long as all the rest
        end_processes(lambda: _find_descendants() if has_children() else None, grace_s)


def _find_descendants() -> Sequence[Process | _Child]:
    import psutil

    try:
        return psutil.Process().children(recursive=True)
    except (psutil.Error, OSError):  # /proc is not mounted, or lacks what is needed
        return _find_children()


class _Child(NamedTuple):
    """A child of this process, whose number is its own until it is reaped."""

    pid: int

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _find_children() -> list[_Child]:
    """Return the children of this process without /proc, by asking for each number.

    Numbers are given out in turn, so the children's lie between this process's and the newest, or
    on both sides of the end, after which they begin anew.
    """
    own, newest = os.getpid(), _newest_number()
    likely = [range(own, newest)] if own < newest else [range(1, newest), range(own, _USUAL_MAX)]
    others = [range(1, _MAX_NUMBER)]
    for ranges in (likely, others):
        if found := [_Child(pid) for some in ranges for pid in some if _is_child(pid)]:
            return found
    return []


def _newest_number() -> int:
    """Return the number of a new thread, which shares the numbers of processes."""
    numbers: list[int] = []
    thread = threading.Thread(target=lambda: numbers.append(threading.get_native_id()))
    thread.start()
    thread.join()
    return numbers[0]


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def end_processes(find: Callable[[], Sequence[Process | _Child] | None], grace_s: float) -> None:
    """End processes: SIGTERM, then SIGKILL after `grace_s` (at least two) seconds.

    Left are processes of another user that refuse the signals, and those that SIGKILL does not end:
    a tracer holds them, or the kernel waits for a device. `find` returns those that run at the
    moment; None: there are no more.
    """
    import psutil

    from headway.launcher.diagnosis.process_state import read_state

    deadline = time.monotonic() + max(grace_s, _MIN_GRACE_S)
    asked: set[Process | _Child] = set()
    left: set[Process | _Child] = set()
    while (found := find()) is not None:
        late = time.monotonic() > deadline
        if time.monotonic() > deadline + KILL_MARGIN_S:
            left |= asked
        left |= {one for one in asked.intersection(found) if read_state(one.pid).is_kept_by_tracer}
        if left and left.issuperset(found):
            return
        for one in found:
            if late or one not in asked:
                asked.add(one)
                try:
                    one.send_signal(signal.SIGKILL if late else signal.SIGTERM)
                except (psutil.AccessDenied, PermissionError):
                    left.add(one)
                except (psutil.NoSuchProcess, ProcessLookupError):
                    pass
        time.sleep(_POLL_S)


def is_running(process: Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    import psutil

    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
