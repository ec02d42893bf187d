"""What a run's wall time was spent on, and what a restart has cost: pure tables."""

from __future__ import annotations

from typing import Any

import pytest

from headway.history.attempts import Attempt, Attempts, shares
from tests.history.runs import figures

BEGAN = 1000.0


def steps(step: int, count: int = 10, **changed: Any) -> Any:
    """Return the figures of steps that took 0.1 s each, a fifth of it waiting for data."""
    taken = {"num_steps": count, "seconds": count / 10, "data_s": count / 50, **changed}
    return figures(step, **taken)


FIRST = Attempt(BEGAN, 1, BEGAN + 2, 50, BEGAN + 7, 4.0, 0.5, 0.5)
AGAIN = Attempt(BEGAN + 8, 41, BEGAN + 11, 100, BEGAN + 17, 4.0, 0.5, 0.5, 1.0)
KILLED = FIRST._replace(last_at=BEGAN + 6)
TABLE: list[tuple[str, list[Attempt], float, dict[str, float] | None]] = [
    # what happens, the attempts, when the run ended, seconds spent on each
    ("no step is known", [Attempt(BEGAN), Attempt(BEGAN + 3)], 9, None),
    (
        "one attempt",
        [FIRST],
        7,
        {"start": 2, "training": 4, "saving": 0.5, "waiting for data": 0.5},
    ),
    (
        "a long evaluation at the end",
        [FIRST],
        20,
        {"start": 2, "training": 4, "saving": 0.5, "waiting for data": 0.5, "other": 13},
    ),
    (
        "a restart; what a killed rank did not report is training, for a second at most",
        [KILLED, AGAIN],
        17,
        {
            "start": 2,
            "training": 9,
            "recovery": 3,
            "repeated steps": 1,
            "saving": 1,
            "waiting for data": 1,
        },
    ),
    (
        "a second attempt without a step",
        [FIRST._replace(last_at=BEGAN + 8), Attempt(BEGAN + 8)],
        10,
        {
            "start": 2,
            "training": 4,
            "recovery": 2,
            "saving": 0.5,
            "waiting for data": 0.5,
            "other": 1,
        },
    ),
    (
        "a first attempt without one",
        [Attempt(BEGAN), AGAIN],
        17,
        {
            "start": 8,
            "recovery": 3,
            "training": 4,
            "repeated steps": 1,
            "saving": 0.5,
            "waiting for data": 0.5,
        },
    ),
    (
        "clocks that differ",
        [FIRST],
        5,
        {"start": 2, "training": 4, "saving": 0.5, "waiting for data": 0.5},
    ),
]


@pytest.mark.parametrize(
    ("attempts", "seconds", "spent"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_the_wall_time_of_a_run_is_shared_out(
    attempts: list[Attempt], seconds: float, spent: dict[str, float] | None
) -> None:
    found = shares(attempts, BEGAN + seconds)
    if spent is None or found is None:
        assert found == spent
        return
    whole = sum(spent.values())
    assert {name: part * whole for name, part in found.items() if part} == pytest.approx(spent)
    assert sum(found.values()) == pytest.approx(1)


def noted(attempts: Attempts, *reports: tuple[float, Any]) -> list[str]:
    """Return the sentences that reports at these seconds give rise to."""
    return [said for at, one in reports if (said := attempts.note(0, one, BEGAN + at))]


def test_steps_count_for_what_they_were_and_repeated_ones_apart() -> None:
    attempts = Attempts(BEGAN)
    assert not noted(attempts, (3, steps(2, 1)), (4, steps(12)), (5, steps(22)))
    assert attempts.note(1, steps(500), BEGAN + 6) == ""  # rank 0 alone counts
    attempts.begin(BEGAN + 7, "restart 1 of 3")
    # it has resumed from step 9, and its second record has steps on both sides of the failure
    said = noted(attempts, (10, steps(11, 1)), (11.9, steps(30, 19)), (12.9, steps(40)))
    assert said == ["restart 1 of 3: 4.2 s to step 23, 13 steps repeated"]
    before, after = attempts.rows
    assert (before.first, before.first_at, before.last) == (1, BEGAN + 2.9, 22)
    assert (before.training_s, before.data_s, before.repeated_s) == pytest.approx((1.68, 0.42, 0))
    assert (after.first, after.first_at, after.last) == (10, BEGAN + 9.9, 40)
    assert (after.training_s, after.data_s, after.repeated_s) == pytest.approx((1.44, 0.36, 1.2))
    noted(attempts, (15, figures(40, num_steps=0, seconds=0.0, save_s=2.0)))  # after the last step
    assert attempts.rows[-1].saving_s == 2


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
    attempts.begin(BEGAN + 7, "restart 1")
    assert noted(attempts, (10, report)) == [said]


def test_a_failure_before_the_first_step_has_nothing_to_repeat() -> None:
    attempts = Attempts(BEGAN)
    attempts.begin(BEGAN + 7, "restart 1")
    assert noted(attempts, (10, steps(2, 1))) == ["restart 1: 2.9 s to step 1"]
