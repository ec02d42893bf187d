"""How a run ends: what happened -> the exit code and what is printed, as one table."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from headway.ipc.records import Crash
from headway.launcher.diagnosis.failures import RankExit, ServerDeath, find_failure
from headway.launcher.diagnosis.reasons import Evidence
from headway.launcher.multinode.messages import Failed
from headway.launcher.processes.run_exit import RunOutcome, run_exit_of

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
KILL, SEGV, ABRT = signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT
BOOM = Crash(1.0, "ValueError", "x", "ValueError: x\n")
LOST_PEER = Crash(1.0, "RuntimeError", "x", "RuntimeError: Connection closed by peer\n")
ELSEWHERE = Failed(1, "host1", "rank 3 failed", "process 7 on host1", "", "fix it", 9)
BY_TERM, BY_HUP = "stopped by SIGTERM", "stopped by SIGHUP"
ABORTED = f"{BY_TERM}; rank 0 of 2 was killed by SIGABRT"
FAILED = f"{BY_TERM}; rank 0 of 2 failed with ValueError"
OWN = "; rank 0 of 2 exited with code 5"
AS_0 = ", as machine 0 reports"


def exits(*codes: int, **how: Any) -> list[RankExit]:
    """Return the ends of ranks with these codes."""
    how = {"was_stopping": False, "exited_silently": False, **how}
    return [RankExit(rank, 70 + rank, code, 1.0 + rank, **how) for rank, code in enumerate(codes)]


def stopped(*codes: int, **how: Any) -> list[RankExit]:
    """Return the ends of ranks that came after the launcher had begun to stop them."""
    return exits(*codes, was_stopping=True, **how)


SILENT = [*exits(0, exited_silently=True), *exits(0, 1, crash=LOST_PEER)[1:]]
TOO_SLOW = stopped(0, -KILL, killed_after_s=30.0)
KILLED = f"{BY_TERM}; ranks 0-1 were killed because they had not stopped after 30 s "
KILLED += "(--grace-period-s)"
UNSAVED = " before all ranks had saved and exited"
THERE, BY_0 = {"remote_failure": ELSEWHERE}, {"is_reported_by_machine_0": True}
HERE = {**THERE, "machine": 1}  # machine 0 blames this machine
AS_BEFORE = {"repeats": "KeyError again", "restarts": "1 of 5 restarts used"}
DUE, NEXT = {"pending_restart": ("restart 1 of 3", "x")}, " before restart 1 of 3; x"
OWN_DUE = {"pending_restart": ("restart 1 of 3", "")}
BEFORE_OWN = "interrupted before restart 1 of 3; rank 1 of 2 exited with code 7"
SERVER = {"failure": ServerDeath(Evidence(-KILL))}
KILLED_SERVER = "the launcher's fork server was killed by SIGKILL"
CUT_SHORT = {"stop": TERM, "will_save": True, "is_cut_short": True}
SAVES, LOST = {"will_save": True}, {"will_save": True, "lost_during_stop": ELSEWHERE}
TABLE: list[tuple[str, list[RankExit], dict[str, Any], int, str]] = [
    # what happens, the ends of two ranks, what else is known -> the code, the line or report
    ("all ranks succeed", exits(0, 0), {}, 0, ""),
    ("all save and stop", exits(75, 75), {}, 75, ""),
    ("one saves, one is through", exits(75, 0), {}, 75, ""),
    ("a stop, and all exit with 0", stopped(0, 0), {"stop": TERM}, 0, ""),
    ("a stop, and all save", stopped(75, 75), {"stop": TERM}, 75, ""),
    ("a stop before ranks start", [], {"stop": TERM}, 143, BY_TERM),
    ("a stop amid the start", exits(-HUP), {"stop": HUP}, 129, BY_HUP),
    ("a stop ends the ranks", stopped(-HUP, -HUP), {"stop": HUP}, 129, BY_HUP),
    ("a rank's code after a stop", stopped(5, 5), {"stop": HUP}, 5, BY_HUP + OWN),
    ("a peer is lost", stopped(1, 0, crash=LOST_PEER), {"stop": TERM}, 143, BY_TERM),
    ("it aborts", stopped(-ABRT, 0), {"stop": TERM}, 143, ABORTED),
    ("an exception at a stop", stopped(1, 0, crash=BOOM), {"stop": TERM}, 143, FAILED),
    ("a rank has to be killed", TOO_SLOW, {"stop": TERM}, 137, KILLED),
    ("a failure amid a save", stopped(75, 1), {"stop": TERM, **SAVES}, 1, "rank 1"),
    ("Ctrl-C ends the ranks", exits(-INT, -INT), {"stop": INT}, 130, "interrupted"),
    ("Ctrl-C, and all exit with 0", exits(0, 0), {"stop": INT}, 130, "interrupted"),
    ("Ctrl-C, and all save", exits(75, 75), {"stop": INT, **SAVES}, 130, ""),
    ("Ctrl-C loses a save", exits(0, 7), {"stop": INT, **SAVES}, 130, f"interrupted{UNSAVED}"),
    ("Ctrl-C after SIGTERM", exits(75, -KILL), CUT_SHORT, 143, BY_TERM + UNSAVED),
    ("Ctrl-C after the save", exits(75, 75), CUT_SHORT, 75, ""),
    ("a stop before a restart", exits(0, 7), {"stop": TERM, **DUE}, 143, BY_TERM + NEXT),
    ("Ctrl-C before a restart", exits(0, 7), {"stop": INT, **DUE}, 130, f"interrupted{NEXT}"),
    ("another machine's, too", stopped(75, 75), {"stop": HUP, **DUE}, 129, BY_HUP + NEXT),
    ("before that of this machine", exits(0, 7), {"stop": INT, **OWN_DUE}, 130, BEFORE_OWN),
    ("a restart that is refused", exits(0, 7), DUE, 7, "rank 1"),
    ("Ctrl-C later", [], {"stop": INT, **THERE}, 130, "interrupted; earlier, rank 3 failed"),
    ("a rank fails", exits(0, 42), {}, 42, "rank 1"),
    ("two ranks fail", exits(3, 42), {}, 3, "rank 0"),
    ("a rank fails as before", exits(0, 42), AS_BEFORE, 76, "rank 1"),
    ("another machine as before", exits(0, 0), {**THERE, **AS_BEFORE}, 76, "rank 3"),
    ("a rank is ended by a signal", exits(0, -KILL), {}, 137, "rank 1"),
    ("a rank crashes in C", exits(0, -SEGV), {}, 139, "rank 1"),
    ("os._exit(0), then a peer fails", SILENT, {}, 1, "rank 0"),
    ("the fork server is killed", [], SERVER, 137, KILLED_SERVER),
    (
        "and the launcher is stopped",
        [],
        {**SERVER, "stop": TERM},
        137,
        f"{BY_TERM}; {KILLED_SERVER}",
    ),
    ("another machine fails", stopped(-TERM, -TERM), THERE, 9, "rank 3"),
    ("which machine 0 reports", [], {**THERE, **BY_0}, 9, f"the run failed on machine 1{AS_0}"),
    ("this machine is blamed", exits(0, 8), HERE, 8, "rank 1"),
    ("by machine 0's report", exits(0, 8), {**HERE, **BY_0}, 8, f"the run failed here{AS_0}"),
    ("a machine is lost amid a save", stopped(0, -KILL), {"stop": TERM, **LOST}, 9, "rank 3"),
    ("a machine is lost after the save", stopped(75, 75), {"stop": TERM, **LOST}, 75, ""),
]


@pytest.mark.parametrize(
    ("ends", "known", "code", "shown"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_how_a_run_ends(ends: list[RankExit], known: dict[str, Any], code: int, shown: str) -> None:
    known = {"failure": find_failure(ends, ranks=[0, 1], world_size=2), **known}
    ending = run_exit_of(RunOutcome(ends, 2, **known))
    report = ending.remote_failure or ending.failure
    assert ending.code == code
    assert ending.is_saved == (ends == exits(75, 75) and (code, shown) == (130, ""))
    if ending.line or report is None:
        assert ending.line == shown
    else:
        assert report.cause.startswith(shown)
    said = f"exit code 76, not the rank's own {report.exit_code if report else 0}: "
    said += "KeyError again; 1 of 5 restarts used"
    assert ending.repeats == (said if "repeats" in known else "")
