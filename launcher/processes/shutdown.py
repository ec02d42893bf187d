"""Stops processes with a signal and, after a grace period, SIGKILL; defines all grace periods.

`Shutdown` is pure; the functions below it terminate the processes that ranks leave running.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from headway.ipc.forking import reap

if TYPE_CHECKING:
    from psutil import Process

    from headway.settings.table import Settings

_VICTIM_S = 5.0  # for ranks that wait for a failed one; they have nothing to save
_SAVING_S = 600.0  # for a checkpoint on slow storage, if the job's end is unknown
_JOB_END = "SLURM_JOB_END_TIME"  # seconds since the epoch
_SPARE_S = 5.0  # for the report, before the scheduler kills the launcher too

KILL_MARGIN_S = 10.0
"""Seconds to wait for the kernel to remove a process after SIGKILL."""

_MIN_GRACE_S = 2.0  # for child processes to remove their files
_POLL_S = 0.05  # most processes exit at once on SIGTERM

_NEVER = float("inf")

T = TypeVar("T", bound=Hashable)


class Grace(NamedTuple):
    """The ranks' grace periods, in seconds."""

    usual_s: float  # after a stop signal
    victim_s: float  # after another rank has failed
    to_save_s: float  # after a stop signal, for a save, if the job's end is unknown
    job_ends_at: float = _NEVER  # when the scheduler kills the job, since the epoch
    kills_idle: bool = False  # whether idle victims are killed at once

    def at(self, now: float) -> Grace:
        """Return the periods of a stop at the Unix time `now`, with the time left for a save."""
        if self.job_ends_at == _NEVER:
            return self
        return self._replace(to_save_s=max(self.job_ends_at - now - _SPARE_S, self.usual_s))


def grace_of(settings: Settings, environ: Mapping[str, str]) -> Grace:
    """Return a launch's grace periods; a period set by the user replaces all of them."""
    usual = settings.grace_period_s
    if settings.are_user_set("grace_period_s"):
        return Grace(usual, usual, usual)
    ends = environ.get(_JOB_END, "")
    ends_at = float(ends) if ends.isascii() and ends.isdecimal() else _NEVER
    return Grace(usual, min(usual, _VICTIM_S), max(usual, _SAVING_S), ends_at, kills_idle=True)


class Shutdown(NamedTuple):
    """The state of a shutdown of processes, such as ranks. All times are from the same clock."""

    number: int  # the stop signal
    began_at: float
    grace: Grace
    will_save: bool = False  # the ranks save when they are stopped
    failed_at: float = _NEVER  # when a rank failed, on any machine
    is_cut_short: bool = False  # by a second Ctrl-C

    @property
    def ends_at(self) -> float:
        """The end of the grace period, according to the first rule below that applies."""
        if self.is_cut_short:
            return self.began_at
        if self.failed_at <= self.began_at:  # other ranks cannot continue
            return self.began_at + self.grace.victim_s
        if self.will_save:  # ranks save together, so none can save after a failure
            return min(self.began_at + self.grace.to_save_s, self.failed_at + self.grace.victim_s)
        return self.began_at + self.grace.usual_s

    def signals(
        self, now: float, running: Iterable[T], sent: Mapping[T, int], idle: Collection[T] = ()
    ) -> dict[T, int]:
        """Return a mapping from processes to the signals that should be sent to them now.

        `sent` maps processes to the last signal that this method returned for them. Processes
        that are running at the first call get the stop signal, even without a grace period.
        `idle` processes have nothing to do before they exit; after a failure, they are killed at
        once.
        """
        found: dict[T, int] = {}
        for process in running:
            is_idle = process in idle and self.failed_at <= self.began_at
            is_over = sent and (is_idle or now >= self.ends_at)
            due = signal.SIGKILL if is_over else self.number
            if sent.get(process) not in (due, signal.SIGKILL):
                found[process] = due
        return found

    def is_abandoned(self, now: float) -> bool:
        """Return whether to stop waiting for processes that are left after SIGKILL."""
        return now >= self.ends_at + KILL_MARGIN_S


def has_children() -> bool:
    """Reap exited children, and return whether children remain."""
    with suppress(ChildProcessError):
        for _ in reap():
            pass
        return True
    return False


def terminate_descendants(grace_s: float) -> None:
    """Terminate all descendants: send SIGTERM and, after `grace_s` seconds (at least two), SIGKILL.

    This process adopts orphans, so it has children as long as it has descendants.
    """
    if not has_children():  # avoids the slow import of psutil
        return
    import psutil

    here = psutil.Process()
    terminate(lambda: here.children(recursive=True) if has_children() else None, grace_s)


def terminate(find: Callable[[], Sequence[Process] | None], grace_s: float) -> None:
    """Terminate processes: send SIGTERM and, after `grace_s` seconds (at least two), SIGKILL.

    `find` returns the running processes, or None if there are none. Processes of other users, and
    those blocked by a tracer or the kernel, may remain.
    """
    import psutil

    period_s = max(grace_s, _MIN_GRACE_S)
    shutdown = Shutdown(signal.SIGTERM, time.monotonic(), Grace(period_s, period_s, period_s))
    sent: dict[Process, int] = {}
    while (found := find()) is not None and not shutdown.is_abandoned(now := time.monotonic()):
        for process, number in shutdown.signals(now, found, sent).items():
            sent[process] = number
            with suppress(psutil.Error):
                process.send_signal(number)
        time.sleep(_POLL_S)


def is_running(process: Process) -> bool:
    """Return whether a process is running and not a zombie."""
    import psutil

    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
