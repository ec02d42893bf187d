"""What a thread loses to its machine, by files that the test writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway.contract import lost_time
from headway.contract.lost_time import Lost, LostTime


@pytest.fixture
def waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kernel says of this thread: on its core, waiting for it, turns."""
    path = tmp_path / "schedstat"
    path.write_text("7000000000 1000000000 42\n")
    monkeypatch.setattr(lost_time, "_WAITED", str(path))
    return path


@pytest.mark.parametrize(
    "text",
    [
        "usage_usec 9\nnr_throttled 3\nthrottled_usec {ms}000\nnr_bursts 0\n",
        "nr_periods 9\nnr_throttled 3\nthrottled_time {ms}000000\n",  # cgroup v1
    ],
)
def test_what_a_used_up_quota_takes_is_told_by_either_cgroup_version(
    waited: Path, tmp_path: Path, text: str
) -> None:
    quota = tmp_path / "cpu.stat"
    quota.write_text(text.format(ms=2000))
    lost = LostTime()
    lost.quota_file = str(quota)
    lost.take()
    waited.write_text("7000000000 1500000000 42\n")
    quota.write_text(text.format(ms=2300))
    assert lost.take() == pytest.approx(Lost(0.5, 0.3))
    waited.write_text("7000000000 1600000000 42\n")
    quota.write_text(text.format(ms=5000))  # on several cores
    assert lost.take() == pytest.approx(Lost(0.1, 0.1))


def test_a_count_that_cannot_be_read_for_a_while_is_no_loss_then_or_later(waited: Path) -> None:
    lost = LostTime()
    assert lost.take() == Lost(1, 0)
    waited.rename(waited.with_suffix(".gone"))
    assert lost.take() == Lost(0, 0)
    waited.with_suffix(".gone").rename(waited)
    lost.quota_file = os.devnull
    assert lost.take() == Lost(0, 0)
