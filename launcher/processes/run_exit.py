"""Determines the exit code and the report of a run on this machine, with pure functions."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import NamedTuple

from headway.ipc.records import REPEATED, STOPPED_AND_SAVED
from headway.launcher.diagnosis.failures import Failure, RankExit, ServerDeath, describe_killed
from headway.launcher.diagnosis.hang import Hang
from headway.launcher.multinode.messages import Failed


class RunOutcome(NamedTuple):
    """The outcome of a run on this machine, whose rank is `machine`."""

    exits: Sequence[RankExit]
    num_ranks: int
    stop: signal.Signals | None = None  # the first stop signal that the launcher received
    failure: Failure | Hang | ServerDeath | None = None  # on this machine
    remote_failure: Failed | None = None  # the run's failure, as decided by machine 0
    lost_during_stop: Failed | None = None  # on another machine, while ranks here were saving
    repeats: str = ""  # why the failure counts as a repeat of an earlier one
    restarts: str = ""  # the number of restarts, as text
    pending_restart: tuple[str, str] = "", ""  # the restart; its cause, if it is not `failure`
    is_cut_short: bool = False  # Ctrl-C ended the grace period
    will_save: bool = False  # the ranks save when they are stopped
    machine: int = 0
    is_reported_by_machine_0: bool = False  # on the same terminal

    @property
    def have_saved(self) -> bool:
        """Whether all ranks have exited, each successfully or after a save."""
        has_failed = any(end.is_failure for end in self.exits)
        return len(self.exits) == self.num_ranks and not has_failed


class RunExit(NamedTuple):
    code: int
    line: str = ""
    failure: Failure | Hang | ServerDeath | None = None
    remote_failure: Failed | None = None
    repeats: str = ""  # why the failure is a repeated one, for the details
    is_saved: bool = False  # rank 0 has logged that all ranks saved after Ctrl-C


def run_exit_of(run: RunOutcome) -> RunExit:
    """Return the exit code and the report of a run, according to the first case that applies.

    The cases are: Ctrl-C, or a stop that prevented a restart or was cut short; a failure on another
    machine; a stop before all ranks had started; no failure; a stop in which no save was lost; any
    other failure. An exception or an abort during a stop is a consequence of the stop.
    """
    stop, failure = run.stop, run.failure
    has_lost = run.will_save and not run.have_saved
    is_cut_short = run.is_cut_short and not run.have_saved
    restart, cause = run.pending_restart
    if stop is not None and (stop == signal.SIGINT or restart or is_cut_short):
        by = "interrupted" if stop == signal.SIGINT else f"stopped by {stop.name}"
        unsaved = " before all ranks had saved and exited" if has_lost else ""
        cause = cause or (failure.cause if failure is not None else "")
        what = f" before {restart}; {cause}" if restart else unsaved
        before = f"; earlier, {run.remote_failure.cause}" if run.remote_failure is not None else ""
        line = f"{by}{what}{before}{describe_killed(run.exits)}"
        # rank 0 has logged why it stopped, and where it saved
        is_logged = line == by and run.machine == 0 and run.have_saved and _has_saved(run)
        return RunExit(128 + stop, "" if is_logged else line, is_saved=is_logged)
    remote_failure = run.remote_failure or (run.lost_during_stop if has_lost else None)
    as_reported = ", as machine 0 reports"
    if remote_failure is not None and (failure is None or remote_failure.machine != run.machine):
        line = f"the run failed on machine {remote_failure.machine}{as_reported}"
        line = line if run.is_reported_by_machine_0 else ""
        return _repeated(run, RunExit(remote_failure.exit_code, line, None, remote_failure))
    if failure is None and stop is not None and len(run.exits) < run.num_ranks:
        return RunExit(128 + stop, f"stopped by {stop.name}")
    if failure is None:
        return RunExit(STOPPED_AND_SAVED if _has_saved(run) else 0)
    if stop is not None and not has_lost:
        first = failure.first if isinstance(failure, Failure) else None
        is_consequence = first is not None and (first.crash or first.code == -signal.SIGABRT)
        code = 128 + stop if is_consequence else failure.exit_code
        is_victim = isinstance(failure, Failure) and failure.suspicion > 1
        own = "" if is_victim or failure.exit_code == 128 + stop else f"; {failure.cause}"
        return RunExit(code, f"stopped by {stop.name}{describe_killed(run.exits) or own}")
    is_brief = isinstance(failure, Failure) and failure.reason.name == "reader_left"
    line = failure.cause if is_brief else ""
    if remote_failure is not None and run.is_reported_by_machine_0:
        line = f"the run failed here{as_reported}"
    return _repeated(run, RunExit(failure.exit_code, line, failure))


def _has_saved(run: RunOutcome) -> bool:
    return any(end.code == STOPPED_AND_SAVED for end in run.exits)


def _repeated(run: RunOutcome, run_exit: RunExit) -> RunExit:
    """Return `run_exit`, with the exit code for repeated failures if this failure is a repeat."""
    if not run.repeats:
        return run_exit
    codes = f"exit code {REPEATED}, not the rank's own {run_exit.code}"
    return run_exit._replace(code=REPEATED, repeats=f"{codes}: {run.repeats}; {run.restarts}")
