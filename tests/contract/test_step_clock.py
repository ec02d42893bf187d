"""What steps are told to take, by a clock and files of the system that the test sets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway.contract import step_clock
from headway.contract.step_clock import (
    BACKWARD,
    DATA,
    FORWARD,
    SAVE,
    SYNC,
    Lost,
    LostTime,
    StepClock,
)


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(step_clock, "_now", time)
    return time


def run_step(clock: StepClock, time: Time) -> bool:
    """Let a step take 1 s for data, 2 forward, 3 backward, 4 of waiting, 5 of saving, 6 else."""
    clock.switch(DATA)
    time.now += 1
    clock.switch(FORWARD)
    clock.batch_samples = 8
    time.now += 2
    clock.switch(BACKWARD)
    time.now += 1
    clock.begin_exchange()
    time.now += 2
    clock.begin_exchange()  # that was not the last gradient
    time.now += 4
    clock.end_backward()
    before = clock.switch(SAVE)
    time.now += 5
    clock.switch(before)
    time.now += 6
    return clock.end_step()


def test_every_moment_of_a_step_counts_once(time: Time) -> None:
    clock = StepClock()
    clock.begin()
    assert run_step(clock, time)
    assert clock.take(1, 0, None) is None  # it warms up
    assert run_step(clock, time)
    figures = clock.take(2, 10, 0.5)
    assert figures is not None
    assert (figures.data_s, figures.forward_s, figures.backward_s) == (1, 2, 3)
    assert (figures.sync_s, figures.save_s, figures.seconds) == (4, 5, 21)
    assert (figures.step, figures.num_steps, figures.samples) == (2, 1, 8)
    assert (figures.total, figures.loss) == (10, 0.5)
    assert figures.rss_bytes > 0


def test_a_record_is_due_once_a_second_and_never_without_a_reader(time: Time) -> None:
    clock = StepClock()
    assert not run_step(clock, time)
    clock.begin()
    assert clock.end_step()
    clock.take(1, 0, None)
    assert clock.end_step()
    clock.take(2, 0, None)
    time.now += 0.9
    assert not clock.end_step()
    time.now += 0.2
    assert clock.end_step()


def test_two_optimizers_make_one_step_and_a_step_set_back_counts_what_was_done(time: Time) -> None:
    clock = StepClock()
    clock.begin()
    clock.end_step()
    clock.take(5, 0, None)
    for _ in range(4):
        clock.end_step()
    figures = clock.take(7, 0, None)
    assert figures is not None
    assert figures.num_steps == 2
    clock.end_step()
    figures = clock.take(1, 0, None)  # an older checkpoint was loaded
    assert figures is not None
    assert figures.num_steps == 1


def test_waiting_amid_saving_is_waiting(time: Time) -> None:
    clock = StepClock()
    with_save = clock.switch(SAVE)
    time.now += 1
    before = clock.switch(SYNC)
    time.now += 2
    clock.switch(before)
    time.now += 3
    clock.switch(with_save)
    assert (clock.spent[SAVE], clock.spent[SYNC]) == (4, 2)


@pytest.fixture
def waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kernel says of this thread: on its core, waiting for it, turns."""
    path = tmp_path / "schedstat"
    path.write_text("7000000000 1000000000 42\n")
    monkeypatch.setattr(step_clock, "_WAITED", str(path))
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
