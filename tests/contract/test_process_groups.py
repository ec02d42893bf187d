"""What is read of torch's flight recorders."""

from __future__ import annotations

import pytest

from headway.contract import process_groups
from headway.contract.records import Collective, Group


def test_a_second_group_under_the_first_ones_name_counts_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = [Collective(number, "all_reduce", "[1]", True, 0.0) for number in (1, 2, 3, 1, 2)]
    monkeypatch.setattr(process_groups, "_flight_records", lambda: [("0", one) for one in made])
    monkeypatch.setattr(process_groups, "_members_by_group", lambda: {"0": (0, 1)})
    assert process_groups.read_groups() == (Group("0", (0, 1), tuple(made[3:])),)
