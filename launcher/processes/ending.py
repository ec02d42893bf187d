"""How a run ends on this machine: its exit code, and what is printed. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from headway.ipc.records import REPEATED, STOPPED_AND_SAVED
from headway.launcher.diagnosis.failures import Failure, RankExit, ServerDeath, describe_killed
from headway.launcher.diagnosis.hang import Hang

if TYPE_CHECKING:
    from headway.launcher.multinode.messages import Failed


class RunOutcome(NamedTuple):
    """What is known at the end of a run; `machine` is this machine's number."""

    exits: Sequence[RankExit]
    num_ranks: int
    stop: signal.Signals | None = None  # the first one that the launcher received
    failure: Failure | Hang | ServerDeath | None = None  # of this machine
    elsewhere: Failed | None = None  # the failure that ended the run, as machine 0 decided
    lost_during_stop: Failed | None = None  # another machine, while ranks here were to save
    repeats: str = ""  # how the failure that ended the run is the one before it again
    restarts: str = ""  # how many there were
    due: tuple[str, str] = "", ""  # the restart that has not begun, and its cause: or `failure`
    is_cut_short: bool = False  # the grace period was ended by Ctrl-C
    will_save: bool = False  # ranks reported that they save when they are stopped
    machine: int = 0
    is_reported_by_machine_0: bool = False  # on the same terminal

    @property
    def have_saved(self) -> bool:
        """Whether all ranks exited as those do that save when they are stopped."""
        codes = {end.code for end in self.exits}
        return len(self.exits) == self.num_ranks and codes <= {0, STOPPED_AND_SAVED}


class Ending(NamedTuple):
    code: int
    line: str = ""
    failure: Failure | Hang | ServerDeath | None = None
    elsewhere: Failed | None = None
    repeats: str = ""  # of a repeated failure: that it is one, to continue a sentence


def ending_of(run: RunOutcome) -> Ending:
    """Return how the run ends; the first row that applies decides.

    Ctrl-C, or a stop that has prevented a restart; a failure on another machine; a stop before all
    ranks had started; no failure; a stop without a save that was lost; a failure.
    """
    stop, failure = run.stop, run.failure
    has_lost = run.will_save and not run.have_saved
    is_cut_short = run.is_cut_short and not run.have_saved
    restart, cause = run.due
    if stop is not None and (stop == signal.SIGINT or restart or is_cut_short):
        by = "interrupted" if stop == signal.SIGINT else f"stopped by {stop.name}"
        unsaved = " before all ranks had saved and ended" if has_lost else ""
        cause = cause or (failure.cause if failure is not None else "")
        what = f" before {restart}; {cause}" if restart else unsaved
        before = f"; before, {run.elsewhere.cause}" if run.elsewhere is not None else ""
        return Ending(128 + stop, f"{by}{what}{before}{describe_killed(run.exits)}")
    elsewhere = run.elsewhere or (run.lost_during_stop if has_lost else None)
    as_reported = ", as machine 0 reports"
    if elsewhere is not None and (failure is None or elsewhere.machine != run.machine):
        line = f"the run has failed on machine {elsewhere.machine}{as_reported}"
        line = line if run.is_reported_by_machine_0 else ""
        return _repeated(run, Ending(elsewhere.exit_code, line, elsewhere=elsewhere))
    if failure is None and stop is not None and len(run.exits) < run.num_ranks:
        return Ending(128 + stop, f"stopped by {stop.name}")
    if failure is None:
        is_saved = any(end.code == STOPPED_AND_SAVED for end in run.exits)
        return Ending(STOPPED_AND_SAVED if is_saved else 0)
    if stop is not None and not has_lost:
        is_consequence = isinstance(failure, Failure) and failure.suspicion > 1
        code = 128 + stop if is_consequence else failure.exit_code
        return Ending(code, f"stopped by {stop.name}{describe_killed(run.exits)}")
    line = "" if failure.fix else failure.cause
    if elsewhere is not None and run.is_reported_by_machine_0:
        line = f"the run has failed here{as_reported}"
    return _repeated(run, Ending(failure.exit_code, line, failure))


def _repeated(run: RunOutcome, ending: Ending) -> Ending:
    """Return the ending with the exit code of a repeated failure, if it is one."""
    if not run.repeats:
        return ending
    codes = f"exit code {REPEATED}, not the rank's own {ending.code}"
    return ending._replace(code=REPEATED, repeats=f"; {codes}: {run.repeats}; {run.restarts}")
