"""A rank is named only where all have stood still for longer than they did before."""

from __future__ import annotations

import time

import pytest

from headway.contract.records import Collective, Frame, Group
from headway.launcher.diagnosis.hang import Observation, RankStatus, Verdict, newest_entry

PLACE = (Frame("/w/train.py", 3, "main"),)


def rank(number: int, *entered_at: float, waits: bool) -> RankStatus:
    """Return a rank that entered collectives at these seconds, and may wait in the last one."""
    last = len(entered_at)
    collectives = tuple(
        Collective(index, "all_reduce", "[4]", not waits or index < last, seconds)
        for index, seconds in enumerate(entered_at, 1)
    )
    return RankStatus(number, stacks=(PLACE,), groups=(Group("0", (0, 1), collectives),))


def observed(
    *entered_at: float, still_s: float, has_moved: bool = False, is_behind: bool = True
) -> Observation:
    ahead = rank(0, *entered_at, waits=True)
    other = rank(1, *entered_at[: -1 if is_behind else None], waits=not is_behind)
    return Observation((ahead, other), has_moved, still_s)


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (observed(0, 1, 2, still_s=4), Verdict.TOO_EARLY),  # always 5 s at least
        (observed(0, 1, 2, still_s=6), Verdict.STILL),
        (observed(0, 10, 20, still_s=29), Verdict.TOO_EARLY),  # three times what was usual
        (observed(0, 10, 20, still_s=31), Verdict.STILL),
        (observed(0, still_s=29), Verdict.TOO_EARLY),  # nothing is known of before
        (observed(0, still_s=31), Verdict.STILL),
        (observed(0, 1, 2, still_s=500, has_moved=True), Verdict.MOVING),
        (observed(0, 1, 2, still_s=500, is_behind=False), Verdict.ALIKE),  # all wait
    ],
)
def test_a_rank_is_named_only_after_standing_still_for_longer_than_before(
    seen: Observation, verdict: Verdict
) -> None:
    assert seen.verdict is verdict
    names_a_rank = seen.describe().count("behind, and did not enter")
    assert names_a_rank == (verdict is Verdict.STILL)
    assert 'File "/w/train.py", line 3, in main' in seen.describe()


@pytest.mark.wording
def test_ranks_that_move_are_said_to_be_slow_and_where_they_are() -> None:
    lines = observed(0, 1, 2, still_s=0, has_moved=True).describe().splitlines()
    assert lines[0] == "ranks 0-1: slow, still moving"
    assert lines[1] == "  rank 0: in all_reduce #3, at /w/train.py:3 in main"
    assert "which is too short to tell" in observed(0, 1, 2, still_s=1).describe()
    assert Observation((), False, 0).describe() == "no rank has started yet"


def test_the_newest_collective_of_all_ranks_counts() -> None:
    now = time.time()
    assert newest_entry([rank(0, 1.0, now, waits=True), rank(1, 2.0, waits=False)]) == now
    assert newest_entry([RankStatus(0)]) == 0
