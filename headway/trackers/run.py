"""The trackers of one run, and what happens when one of them fails."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from headway.notes import say
from headway.trackers.tracker import GeneralTracker

_PATIENCE = 10
"""A tracker that failed rests for so many times as long as the failed call took. So a network that
does not answer costs a training at most a tenth of its time."""


class TrackedRun:
    """Calls the trackers of a run from its start to its end.

    An error of a tracker reaches the script as long as `log` has not worked once: it is the
    script's, or a matter of setup. A later one (a full disk, a network) is told on stderr and the
    training goes on; the tracker is tried again, and at the end stderr says how many calls it
    missed.
    """

    def __init__(self, trackers: Sequence[GeneralTracker]) -> None:
        self._members = [_Member(tracker) for tracker in trackers]

    def start(self, config: dict[str, Any] | None) -> None:
        """Start all trackers, and give them the hyperparameters."""
        atexit.register(self._finish_at_exit)
        for member in self._members:
            member.tracker.start()
            member.has_started = True
        if config is not None:
            for member in self._members:
                member.tracker.store_init_configuration(config)

    def log(
        self, values: dict[str, Any], step: int | None, log_kwargs: dict[str, dict[str, Any]]
    ) -> None:
        """Log `values` to all trackers."""
        for member in self._members:
            member.log(values, step, log_kwargs.get(member.tracker.name, {}))

    def finish(self) -> None:
        """Finish all trackers that have started."""
        atexit.unregister(self._finish_at_exit)
        for member in self._members:
            member.finish(member.tracker.finish)

    def _finish_at_exit(self) -> None:
        has_failed = getattr(sys, "last_type", None) is not None
        for member in self._members:
            tracker = member.tracker
            member.finish(tracker.finish_after_error if has_failed else tracker.finish)


class _Member:
    """One tracker, and how it fares."""

    def __init__(self, tracker: GeneralTracker) -> None:
        self.tracker = tracker
        self.has_started = False
        self._has_logged = False
        self._missed = 0
        self._retry_at: float | None = None

    def log(self, values: dict[str, Any], step: int | None, kwargs: dict[str, Any]) -> None:
        if self._retry_at is not None and time.monotonic() < self._retry_at:
            self._missed += 1
            return
        began = time.monotonic()
        try:
            self.tracker.log(values, step=step, **kwargs)
        except Exception as error:
            if not self._has_logged:
                raise
            self._miss(error, began)
        else:
            self._has_logged, self._retry_at = True, None

    def _miss(self, error: Exception, began: float) -> None:
        if not self._missed:
            say(
                f"the tracker {self.tracker.name!r} failed: {_described(error)}\n"
                "  the training goes on, and the tracker is tried again"
            )
        self._missed += 1
        now = time.monotonic()
        self._retry_at = now + _PATIENCE * (now - began)

    def finish(self, end: Callable[[], None]) -> None:
        if not self.has_started:
            return
        self.has_started = False
        try:
            end()
        except Exception as error:  # noqa: BLE001  the others are finished all the same
            say(f"the tracker {self.tracker.name!r} failed as it ended: {_described(error)}")
        if self._missed:
            times = "call" if self._missed == 1 else "calls"
            say(f"the tracker {self.tracker.name!r} missed {self._missed} {times} of log()")


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
