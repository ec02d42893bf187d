"""A restart is immediate after progress, and delayed longer after each failure without it."""

from __future__ import annotations

import pytest

from headway.settings.resolve import resolve
from tests.machines.recorded import load

pytest.importorskip("torch")
from headway.launcher.processes.agent import RestartBackoff


def test_the_default_delay_doubles_from_1_s_to_60_s_and_is_none_after_progress() -> None:
    restarts = RestartBackoff(resolve([], load("laptop_cpu"), {}).restart_delay)

    def next_delay(step: int = 0, lasted_s: float = 1) -> float:
        return restarts.next_restart("", step, lasted_s)[1]

    assert [next_delay() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [next_delay(lasted_s=61), next_delay()] == [0, 1]
    assert [next_delay(step) for step in (7, 7, 5, 7, 8)] == [0, 1, 2, 4, 0]  # repeated ones
    assert next_delay(8, lasted_s=61) == 1
    machines = RestartBackoff(3, is_one_machine=False)
    assert [machines.next_restart("", step, 1)[1] for step in (7, 7, 8)] == [3, 3, 3]
    never = RestartBackoff(0)
    assert {never.next_restart("restart", 0, 0) for _ in range(5)} == {("restart", 0)}
    assert RestartBackoff(1).next_restart("restart", 0, 0) == ("restart in 1 s", 1)
