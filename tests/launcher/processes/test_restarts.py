"""Each restart is announced in a line, and put off longer after each failure without progress."""

from __future__ import annotations

import signal

from headway.contract.records import Crash
from headway.launcher.diagnosis.failures import Failure, RankExit, ServerDeath
from headway.launcher.diagnosis.reasons import Evidence
from headway.launcher.machines.messages import Restart
from headway.launcher.processes.restarts import Restarts
from headway.settings.resolve import resolve
from tests.machines.recorded import load


def failure(message: str = "away") -> Failure:
    crash = Crash(1.0, "OSError", message, f"Traceback ...\nOSError: {message}\n")
    return Failure(RankExit(0, 7, 1, 1.0, False, crash), (), (), (), 2, Evidence(1, crash))


def test_the_default_delay_doubles_from_1_s_to_60_s_and_starts_anew_after_progress() -> None:
    restarts = Restarts(20, resolve([], load("laptop_cpu"), {}).restart_delay)

    def next_delay(made_progress: bool = False) -> float:
        return restarts.after(failure(), 1, made_progress)[1]

    assert [next_delay() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [next_delay(made_progress=True), next_delay()] == [1, 2]


def test_a_delay_of_zero_stays_zero() -> None:
    restarts = Restarts(5, 0)
    assert {restarts.after(failure(), number, False)[1] for number in range(1, 6)} == {0}


def test_a_restart_says_whether_the_failure_is_the_same_as_before() -> None:
    restarts = Restarts(5, 1)
    failures: list[Failure | ServerDeath] = [failure(), failure(), failure("gone")]
    failures.append(ServerDeath(Evidence(-signal.SIGKILL)))
    lines = [
        restarts.after(what, number, made_progress=False)[0]
        for number, what in enumerate(failures, 1)
    ]
    assert lines == [
        "rank 0 of 2 failed with OSError; restart 1 of 5 in 1 s",
        "same failure as before (2 of 5): rank 0 of 2 failed with OSError; restart in 2 s",
        "rank 0 of 2 failed with OSError; restart 3 of 5 in 4 s",
        "the process that starts the ranks was ended by SIGKILL; restart 4 of 5 in 8 s",
    ]


def test_a_restart_of_all_machines_says_what_failed_and_a_loss_is_not_counted() -> None:
    restarts = Restarts(5, 1)
    ordered = [Restart("rank 3 of 4 failed with OSError", 2), Restart("machine 1 was lost", 0)]
    assert [restarts.as_ordered(one, made_progress=False) for one in ordered] == [
        ("rank 3 of 4 failed with OSError; restart 2 of 5 on all machines in 1 s", 1),
        ("machine 1 was lost; going on with the machines that are there in 2 s", 2),
    ]
