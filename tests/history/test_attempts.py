"""What a run's wall time was spent on, and what a restart has cost: pure tables."""

from __future__ import annotations

from typing import Any

import pytest

from headway.history.attempts import SHARES, Attempt, Attempts, shares
from tests.history.runs import stats

BEGAN = 1000.0
NOTHING = {"training": 0.0, "saving": 0.0, "waiting for data": 0.0, "repeated steps": 0.0}


def steps(step: int, count: int = 10, **changed: Any) -> Any:
    """Return the stats of steps that took 0.1 s each, a fifth of it waiting for data."""
    taken = {"num_steps": count, "seconds": count / 10, "data_s": count / 50, **changed}
    return stats(step, **taken)


SPENT = {"training": 4.0, "saving": 0.5, "waiting for data": 0.5}
NONE, LATER = (Attempts(at).rows[0] for at in (BEGAN, BEGAN + 8))
FIRST = NONE._replace(first=1, first_at=BEGAN + 2, last=50, last_at=BEGAN + 7, spent=SPENT)
AGAIN = Attempt(
    BEGAN + 8, 41, BEGAN + 11, 100, BEGAN + 17, {**SPENT, "repeated steps": 1.0}, "", 0, 0
)
KILLED, LATE = FIRST._replace(last_at=BEGAN + 6), FIRST._replace(last_at=BEGAN + 8)
TABLE: list[tuple[str, list[Attempt], float, tuple[float, ...] | None]] = [
    # what happens, the attempts, when the run ended, seconds of each of SHARES
    ("no step is known", [NONE, LATER], 9, None),
    ("one attempt", [FIRST], 7, (4, 2, 0, 0, 0.5, 0.5, 0)),
    ("a long evaluation at the end", [FIRST], 20, (4, 2, 0, 0, 0.5, 0.5, 13)),
    ("a restart, and up to a second unreported", [KILLED, AGAIN], 17, (9, 2, 3, 1, 1, 1, 0)),
    ("a second attempt without a step", [LATE, LATER], 10, (4, 2, 2, 0, 0.5, 0.5, 1)),
    ("a first attempt without one", [NONE, AGAIN], 17, (4, 8, 3, 1, 0.5, 0.5, 0)),
    ("clocks that differ", [FIRST], 5, (4, 2, 0, 0, 0.5, 0.5, 0)),
]


@pytest.mark.parametrize(
    ("attempts", "seconds", "spent"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_the_wall_time_of_a_run_is_shared_out(
    attempts: list[Attempt], seconds: float, spent: tuple[float, ...] | None
) -> None:
    found = shares(attempts, BEGAN + seconds)
    assert (found is None) == (spent is None)
    if spent is not None:
        parts = [part / sum(spent) for part in spent]
        assert found == pytest.approx(dict(zip(SHARES, parts, strict=True)))


def noted(attempts: Attempts, *reports: tuple[float, Any]) -> list[str]:
    """Return the sentences that reports at these seconds give rise to."""
    return [said for at, report in reports if (said := attempts.note(0, report, BEGAN + at))]


def test_steps_count_for_what_they_were_and_repeated_ones_apart() -> None:
    attempts = Attempts(BEGAN)
    assert not noted(attempts, (3, steps(2, 1)), (4, steps(12)), (5, steps(22)))
    assert attempts.note(1, steps(500), BEGAN + 6) == ""  # rank 0 alone counts
    attempts.begin("restart 1 of 3", BEGAN + 7, "", 0, 0)
    # it has resumed from step 9, and its second record has steps on both sides of the failure
    said = noted(attempts, (10, steps(11, 1)), (11.9, steps(30, 19)), (12.9, steps(40)))
    assert said == ["restart 1 of 3: 4.2 s to step 23, 13 steps repeated"]
    before, after = attempts.rows
    assert (before.first, before.first_at, before.last) == (1, BEGAN + 2.9, 22)
    assert before.spent == pytest.approx({**NOTHING, "training": 1.68, "waiting for data": 0.42})
    assert (after.first, after.first_at, after.last) == (10, BEGAN + 9.9, 40)
    spent = {"training": 1.44, "waiting for data": 0.36, "repeated steps": 1.2}
    assert after.spent == pytest.approx({**NOTHING, **spent})
    noted(attempts, (15, stats(40, num_steps=0, seconds=0.0, save_s=2.0)))  # after the last step
    assert attempts.rows[-1].spent["saving"] == 2


RESTARTS = [
    ("from where it was", steps(24, 1), "restart 1: 2.9 s to step 23, 0 steps repeated"),
    ("from the step before", steps(23, 1), "restart 1: 3.0 s to step 23, 1 step repeated"),
    (
        "of a script that counts its own steps",
        steps(2, 1, data_s=0.0, forward_s=0.0, backward_s=0.0, total=0),
        "restart 1: 2.9 s to step 1",
    ),
]


@pytest.mark.parametrize(
    ("report", "said"), [row[1:] for row in RESTARTS], ids=[row[0] for row in RESTARTS]
)
def test_a_restart_says_what_it_cost(report: Any, said: str) -> None:
    attempts = Attempts(BEGAN)
    noted(attempts, (3, steps(22)))
    attempts.begin("restart 1", BEGAN + 7, "", 0, 0)
    assert noted(attempts, (10, report)) == [said]


def test_a_failure_before_the_first_step_has_nothing_to_repeat() -> None:
    attempts = Attempts(BEGAN)
    attempts.begin("restart 1", BEGAN + 7, "", 0, 0)
    assert noted(attempts, (10, steps(2, 1))) == ["restart 1: 2.9 s to step 1"]


def test_a_failure_after_the_first_step_which_has_no_stats_ends_the_start() -> None:
    attempts = Attempts(BEGAN)
    attempts.end(0, BEGAN + 3)
    assert shares(attempts.rows, BEGAN + 5) is None
    attempts.end(1, BEGAN + 3)
    attempts.end(2, BEGAN + 4)  # its end is known
    attempts.begin("restart 1 of 3", BEGAN + 3, "", 0, 1)
    attempts.end(1, BEGAN + 4)
    found = shares(attempts.rows, BEGAN + 5)
    assert found is not None
    assert {name for name, part in found.items() if part} == {"start", "recovery", "other"}
    assert (found["start"], found["recovery"], attempts.rows[-1].num_restarts) == (0.6, 0.2, 1)
