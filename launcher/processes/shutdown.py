"""How processes are stopped: a signal, a grace period, SIGKILL; all periods of it.

`Shutdown` is a pure table; below it, processes that would outlive their launcher are ended by it.
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

_VICTIM_S = 5.0  # they wait for a rank that is gone, and have nothing to save
_SAVING_S = 600.0  # for a checkpoint on slow storage, where the job's end is unknown
_JOB_END = "SLURM_JOB_END_TIME"  # seconds since the epoch
_SPARE_S = 5.0  # for the report, before the scheduler kills the launcher too

KILL_MARGIN_S = 10.0
"""How long to wait for the kernel to end a process after SIGKILL."""

_MIN_GRACE_S = 2.0  # a process may remove its files then, even where ranks are killed at once
_POLL_S = 0.05  # most processes end at once on SIGTERM

_NEVER = float("inf")

T = TypeVar("T", bound=Hashable)


class Grace(NamedTuple):
    """How long ranks may take to stop, in seconds."""

    usual_s: float  # after a stop signal
    victim_s: float  # after another rank has failed
    to_save_s: float  # after a stop signal, if they save then and the job's end is unknown
    job_ends_at: float = _NEVER  # when the scheduler kills all of the job, since the epoch
    kills_idle: bool = False  # victims that have nothing to do are killed at once

    def saving_s(self, now: float) -> float:
        """Return how long a save may take that starts `now`, seconds since the epoch."""
        if self.job_ends_at == _NEVER:
            return self.to_save_s
        return max(self.job_ends_at - now - _SPARE_S, self.usual_s)


def grace_of(settings: Settings, environ: Mapping[str, str]) -> Grace:
    """Return the periods of a launch; a period that the user has set holds for all ranks."""
    usual = settings.grace_period_s
    if settings.are_user_set("grace_period_s"):
        return Grace(usual, usual, usual)
    ends = environ.get(_JOB_END, "")
    ends_at = float(ends) if ends.isascii() and ends.isdecimal() else _NEVER
    return Grace(usual, min(usual, _VICTIM_S), max(usual, _SAVING_S), ends_at, kills_idle=True)


class Shutdown(NamedTuple):
    """The stop of processes, such as ranks, as far as it has come; all times are on one clock."""

    number: int  # the signal that asks ranks to stop
    began_at: float
    usual_s: float
    victim_s: float
    saving_s: float
    will_save: bool = False  # ranks reported that they save when they are stopped
    failed_at: float = _NEVER  # a rank failed, here or on another machine
    is_cut_short: bool = False  # by a second Ctrl-C

    @property
    def ends_at(self) -> float:
        """When the grace period is over; the first rule that applies decides."""
        if self.is_cut_short:
            return self.began_at
        if self.failed_at <= self.began_at:  # the others only suffer from it
            return self.began_at + self.victim_s
        if self.will_save:  # together: once a rank has failed, none can
            return min(self.began_at + self.saving_s, self.failed_at + self.victim_s)
        return self.began_at + self.usual_s

    def signals(
        self, now: float, running: Iterable[T], sent: Mapping[T, int], idle: Collection[T] = ()
    ) -> dict[T, int]:
        """Return the signal to send to each running process that has not been sent it yet.

        `sent` has the last signal that each process was sent by this method. Those that are there
        at first are asked to stop even without a grace period. Of victims, the `idle` ones have
        nothing to do before they end.
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
        """Whether what still runs is not waited for: SIGKILL does not end it."""
        return now >= self.ends_at + KILL_MARGIN_S


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
    while (found := find()) is not None and not shutdown.is_abandoned(now := time.monotonic()):
        for process, number in shutdown.signals(now, found, sent).items():
            sent[process] = number
            with suppress(psutil.Error):
                process.send_signal(number)
        time.sleep(_POLL_S)


def is_running(process: Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    import psutil

    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
