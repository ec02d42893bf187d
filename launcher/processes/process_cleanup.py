"""Ends processes that would outlive their launcher."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from headway.contract.forking import reap
from headway.launcher.processes.shutdown import Shutdown

if TYPE_CHECKING:
    from psutil import Process

_MIN_GRACE_S = 2.0  # a process may remove its files then, even where ranks are killed at once
_POLL_S = 0.05  # most processes end at once on SIGTERM


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
    if not has_children():  # importing psutil takes as long as all the rest
        return
    import psutil

    here = psutil.Process()
    end_processes(lambda: here.children(recursive=True) if has_children() else None, grace_s)


def end_processes(find: Callable[[], Sequence[Process] | None], grace_s: float) -> None:
    """End processes: SIGTERM, then SIGKILL after `grace_s` (at least two) seconds.

    `find` returns those that run at the moment; None: there are no more. Left is what SIGKILL does
    not end: a process of another user, or one that a tracer or the kernel keeps.
    """
    import psutil

    period_s = max(grace_s, _MIN_GRACE_S)
    shutdown = Shutdown(signal.SIGTERM, time.monotonic(), period_s, period_s, period_s)
    sent: dict[Process, int] = {}
    while (found := find()) is not None and not shutdown.is_given_up(now := time.monotonic()):
        for one, number in shutdown.signals(now, found, sent).items():
            sent[one] = number
            with suppress(psutil.Error):
                one.send_signal(number)
        time.sleep(_POLL_S)


def is_running(process: Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    import psutil

    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
