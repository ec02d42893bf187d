"""How ranks are named in messages."""

from __future__ import annotations

from headway.launcher.reporting.rank_names import named, ranges


def test_ranks_are_written_as_ranges() -> None:
    assert ranges([7, 0, 2, 3, 4]) == "0, 2-4, 7"
    assert named([3]) == "rank 3"
    assert named([0, 2, 3]) == "ranks 0, 2-3"
