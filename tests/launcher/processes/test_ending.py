"""How a run ends: what happened -> the exit code and what is printed, as one table."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from headway.contract.records import Crash
from headway.launcher.diagnosis.failures import RankExit, ServerDeath, find_failure
from headway.launcher.machines.messages import Failed
from headway.launcher.processes.ending import Outcome, ending_of

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
KILL, SEGV = signal.SIGKILL, signal.SIGSEGV
LOST_PEER = Crash(1.0, "RuntimeError", "x", "RuntimeError: Connection closed by peer\n")
ELSEWHERE = Failed(1, "host1", "rank 3 failed", "process 7 on host1", "", "fix it", 9)
FAILED_THERE = "the run has failed on machine 1, as machine 0 reports"


def exits(*codes: int, **how: Any) -> list[RankExit]:
    """Return the ends of ranks with these codes; those that were stopped ended after it."""
    how = {"was_stopping": False, "left_silently": False, **how}
    return [RankExit(rank, 70 + rank, code, 1.0 + rank, **how) for rank, code in enumerate(codes)]


def outcome(ends: list[RankExit], **known: Any) -> Outcome:
    """Return the outcome of a run of two ranks, with the failure that its exits show."""
    if "failure" not in known:
        known["failure"] = find_failure(ends, ranks=[0, 1], world_size=2)
    return Outcome(ends, 2, **known)


STOPPED: dict[str, Any] = {"was_stopping": True}
KILLED = exits(0, -KILL, was_stopping=True, killed_after_s=30.0)
UNSAVED = "interrupted, and nothing was saved since the last checkpoint"
TABLE: list[tuple[str, Outcome, int, str]] = [
    ("all ranks succeed", outcome(exits(0, 0)), 0, ""),
    ("all saved and stopped", outcome(exits(75, 75)), 75, ""),
    ("one saved, one was through", outcome(exits(75, 0)), 75, ""),
    ("a stop, and all exit with 0", outcome(exits(0, 0, **STOPPED), stop=TERM), 0, ""),
    ("a stop, and all save", outcome(exits(75, 75, **STOPPED), stop=TERM), 75, ""),
    ("a stop before ranks start", outcome([], stop=TERM), 143, "stopped by SIGTERM"),
    ("a stop amid the start", outcome(exits(-HUP), stop=HUP), 129, "stopped by SIGHUP"),
    ("a stop ends the ranks", outcome(exits(-HUP, -HUP), stop=HUP), 129, "stopped by SIGHUP"),
    (
        "a rank's code after a stop",
        outcome(exits(5, 5, **STOPPED), stop=HUP),
        5,
        "stopped by SIGHUP",
    ),
    (
        "a stop, and a rank loses its peer",
        outcome(exits(1, 0, crash=LOST_PEER, **STOPPED), stop=TERM),
        143,
        "stopped by SIGTERM",
    ),
    (
        "a stop, and a rank has to be killed",
        outcome(KILLED, stop=TERM),
        137,
        "stopped by SIGTERM; ranks 0-1 were killed, still stopping after 30 s (--grace-period-s)",
    ),
    ("Ctrl-C ends the ranks", outcome(exits(-INT, -INT), stop=INT), 130, "interrupted"),
    ("Ctrl-C, and all exit with 0", outcome(exits(0, 0), stop=INT), 130, "interrupted"),
    ("Ctrl-C, and all save", outcome(exits(75, 75), stop=INT, will_save=True), 130, "interrupted"),
    ("Ctrl-C loses a save", outcome(exits(0, 7), stop=INT, will_save=True), 130, UNSAVED),
    (
        "Ctrl-C after a failure elsewhere",
        outcome(exits(-TERM, -TERM), stop=INT, elsewhere=ELSEWHERE),
        130,
        "interrupted; before, rank 3 failed",
    ),
    ("a rank fails", outcome(exits(0, 42)), 42, "rank 1"),
    ("the first failure's code", outcome(exits(3, 42)), 3, "rank 0"),
    ("a rank is ended by a signal", outcome(exits(0, -KILL)), 137, "rank 1"),
    ("a rank crashes in C", outcome(exits(0, -SEGV)), 139, "rank 1"),
    (
        "a rank leaves by os._exit(0) before another fails in communication",
        outcome([*exits(0, left_silently=True), *exits(0, 1, crash=LOST_PEER)[1:]]),
        1,
        "rank 0",
    ),
    (
        "a failure amid a save",
        outcome(exits(75, 1, **STOPPED), stop=TERM, will_save=True),
        1,
        "rank 1",
    ),
    ("the fork server is killed", outcome([], failure=ServerDeath(-KILL)), 137, "the process that"),
    ("another machine fails", outcome(exits(-TERM, -TERM), elsewhere=ELSEWHERE), 9, "rank 3"),
    (
        "another machine fails, which machine 0 reports",
        outcome([], elsewhere=ELSEWHERE, is_reported_by_machine_0=True),
        9,
        FAILED_THERE,
    ),
    (
        "this machine's failure ended all",
        outcome(exits(0, 8), elsewhere=ELSEWHERE, machine=1),
        8,
        "rank 1",
    ),
    (
        "this machine's failure, which machine 0 reports",
        outcome(exits(0, 8), elsewhere=ELSEWHERE, machine=1, is_reported_by_machine_0=True),
        8,
        "the run has failed here, as machine 0 reports",
    ),
    (
        "a machine is lost amid a save",
        outcome(exits(0, -KILL), stop=TERM, will_save=True, lost_amid_stop=ELSEWHERE),
        9,
        "rank 3",
    ),
    (
        "a machine is lost after the save",
        outcome(exits(75, 75), stop=TERM, will_save=True, lost_amid_stop=ELSEWHERE),
        75,
        "",
    ),
]


@pytest.mark.parametrize(
    ("run", "code", "shown"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE]
)
def test_how_a_run_ends(run: Outcome, code: int, shown: str) -> None:
    ending = ending_of(run)
    report = ending.elsewhere or ending.failure
    assert ending.code == code
    if ending.line or report is None:
        assert ending.line == shown
    else:
        assert report.cause.startswith(shown)
