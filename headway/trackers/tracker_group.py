"""The active trackers of a training run."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from headway.errors import Code, UsageError
from headway.ipc.stderr import log, log_once
from headway.trackers.choice import (
    LOGGER_TYPE_TO_CLASS,
    LoggerType,
    check_names,
    choose_trackers,
    folders_of,
)
from headway.trackers.project import ProjectConfiguration
from headway.trackers.tracker import GeneralTracker, NoTracker

_RETRY_FACTOR = 10
"""A failed tracker is skipped for this many times the duration of the failed call, so that an
unreachable network costs at most a tenth of the training time."""


class _Member:
    """A tracker of a run, and a record of its failures.

    Until `log` has succeeded once, errors are raised, because they indicate a misconfiguration.
    Later errors, such as a full disk or a network failure, are logged, and training continues. The
    tracker is retried, and the number of missed calls is logged at the end.
    """

    def __init__(self, tracker: GeneralTracker) -> None:
        self.tracker = tracker
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
            if not self._has_logged or isinstance(error, UsageError):
                raise
            if not self._missed:
                log(
                    f"the tracker {self.tracker.name!r} failed: {_described(error)}\n"
                    "  training continues, and the tracker will be retried"
                )
            self._missed += 1
            now = time.monotonic()
            self._retry_at = now + _RETRY_FACTOR * (now - began)
        else:
            self._has_logged, self._retry_at = True, None

    def finish(self, end: Callable[[], None]) -> None:
        try:
            end()
        except Exception as error:  # noqa: BLE001  the other trackers are still finished
            log(f"the tracker {self.tracker.name!r} failed to finish: {_described(error)}")
        if self._missed:
            times = "call" if self._missed == 1 else "calls"
            log(f"the tracker {self.tracker.name!r} missed {self._missed} log() {times}")


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


Tracker = str | LoggerType | GeneralTracker
LogWith = Tracker | Sequence[Tracker] | None

RUNS_FILE = "trackers.json"


class TrackedRuns(NamedTuple):
    """The trackers' runs, as saved in a checkpoint."""

    run_ids: Mapping[str, str]  # by tracker
    last_step: int  # of `log`; -1: none


class Tracking:
    """The trackers of a run; by default, only rank 0 calls them.

    `log_with` contains the requested trackers, as names or as the script's instances. `trackers`
    contains the active run's trackers; on ranks other than 0, it omits those with
    `main_process_only`.
    """

    def __init__(self, is_main: bool, log_with: LogWith, project: ProjectConfiguration) -> None:
        self.log_with = choose_trackers(log_with)
        self.trackers: list[GeneralTracker] = []
        self._is_main, self._project = is_main, project
        for choice in self.log_with:
            if isinstance(choice, str):
                folders_of(LOGGER_TYPE_TO_CLASS[choice], project.logging_dir)
        self._run: list[_Member] | None = None  # None if no run is active
        self._runs_before: Mapping[str, str] = {}  # run IDs in the checkpoint, by tracker
        self._last_step = -1  # of `log`

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        init_kwargs = dict(init_kwargs or {})
        check_names(init_kwargs, "init_kwargs", self.log_with)
        for name, run_id in self._runs_before.items():
            if name in self.log_with:
                keywords = LOGGER_TYPE_TO_CLASS[name].resume_kwargs(run_id)
                init_kwargs[name] = keywords | init_kwargs.get(name, {})
        self.finish()
        made = []
        for choice in self.log_with:
            tracker: Any = choice
            if isinstance(choice, str):
                kind: Any = LOGGER_TYPE_TO_CLASS[choice]
                folders = folders_of(kind, self._project.logging_dir)
                tracker = kind(project_name, *folders, **init_kwargs.get(choice, {}))
            if self._is_main or not tracker.main_process_only:
                made.append(tracker)
        self.trackers = made
        self._run = []
        atexit.register(self._finish_at_exit)
        for tracker in self.trackers:
            tracker.start()
            self._run.append(_Member(tracker))
        if config is not None:
            for tracker in self.trackers:
                tracker.store_init_configuration(config)

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        if self._run is None:
            if self.log_with and self._is_main:
                log_once("log() has no effect before init_trackers() and after end_training()")
            return
        if log_kwargs:
            check_names(log_kwargs, "log_kwargs", self.log_with)
        step = self._last_step + 1 if step is None else step
        with suppress(TypeError, ValueError):  # a custom tracker may accept any step
            self._last_step = int(step)
        for member in self._run:
            member.log(values, step, (log_kwargs or {}).get(member.tracker.name, {}))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        names = [choice if isinstance(choice, str) else choice.name for choice in self.log_with]
        if not names or (name in names and not self._is_main):
            return NoTracker()
        raise UsageError(
            f"the tracker {name!r} is not active",
            where="the script's get_tracker(...)",
            fix="call init_trackers(...) first"
            if name in names
            else f"use a tracker that log_with contains: {', '.join(names)}",
            code=Code.TRACKER,
        )

    def finish(self) -> None:
        """Finish the trackers; this also happens at exit."""
        if self._run is not None:
            atexit.unregister(self._finish_at_exit)
            for member in self._run:
                member.finish(member.tracker.finish)
            self._run, self._last_step = None, -1

    def _finish_at_exit(self) -> None:
        has_failed = getattr(sys, "last_type", None) is not None
        for member in self._run or ():
            tracker = member.tracker
            member.finish(tracker.finish_after_error if has_failed else tracker.finish)

    def runs(self) -> TrackedRuns:
        named = {t.name: t.run_id for t in self.trackers if t.name in self.log_with}
        run_ids = {name: run_id for name, run_id in named.items() if run_id is not None}
        return TrackedRuns(run_ids, self._last_step)

    def continue_runs(self, saved: TrackedRuns) -> None:
        self._runs_before, self._last_step = saved
        own = self.runs().run_ids
        for name in saved.run_ids.keys() & own.keys():
            if own[name] != saved.run_ids[name]:
                log(
                    f"{name} started a new run instead of continuing the checkpoint's run; call"
                    " accelerator.resume() before init_trackers()"
                )
