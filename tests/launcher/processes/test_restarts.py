"""Each restart is announced in a line, and put off longer after each failure without progress."""

from __future__ import annotations

import pytest

from headway.settings.resolve import resolve
from tests.machines.recorded import load

pytest.importorskip("torch")
from headway.launcher.processes.agent import Restarts

CAUSE = "rank 0 of 2 failed with OSError"


def test_the_default_delay_doubles_from_1_s_to_60_s_and_starts_anew_after_progress() -> None:
    restarts = Restarts(20, resolve([], load("laptop_cpu"), {}).restart_delay)

    def next_delay(step: int = 0, lasted_s: float = 1) -> float:
        return restarts.after(CAUSE, 1, step, lasted_s)[1]

    assert [next_delay() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [next_delay(lasted_s=61), next_delay()] == [1, 2]
    assert [next_delay(step) for step in (7, 7, 5, 7, 8)] == [1, 2, 4, 8, 1]  # repeated ones
    assert next_delay(8, lasted_s=61) == 2
    never = Restarts(5, 0)
    assert {never.after(CAUSE, number, 0, 0)[1] for number in range(1, 6)} == {0}


def test_a_restart_names_the_failure_and_the_loss_of_a_machine_is_not_counted() -> None:
    restarts = Restarts(5, 1)
    assert [
        restarts.after(CAUSE, 1, 0, 1),
        restarts.after(CAUSE, 2, 0, 1, where=" on all machines"),
        restarts.after("machine 1 was lost", 0, 0, 1, where=" on all machines"),
    ] == [
        (f"{CAUSE}; restart 1 of 5 in 1 s", 1),
        (f"{CAUSE}; restart 2 of 5 on all machines in 2 s", 2),
        ("machine 1 was lost; going on with the machines that are there in 4 s", 4),
    ]
