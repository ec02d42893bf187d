"""What the launcher says of a run, and of its slow rank, from the records of its ranks."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.ipc.records import StepStats
from headway.launcher.step_stats.run_stats import RunStats
from headway.launcher.step_stats.slow_rank import (
    MIN_SHARE,
    SlowRank,
    Times,
    find_persistent_slow_rank,
    find_slow_rank,
    mean_step,
)
from tests.history.runs import stats

PASSES = {"forward_s": 0.6, "backward_s": 0.9}
USUAL = stats(100, num_steps=20, seconds=2.0, sync_s=0.1, samples=640, loss=0.5, **PASSES)
WAITING = USUAL._replace(seconds=2.6, sync_s=0.7)  # for one that is slow by 0.6 s
SLOW = USUAL._replace(seconds=2.6, data_s=0.8)


def run_of(num_ranks: int) -> tuple[RunStats, list[str]]:
    stats, told = RunStats(), list[str]()
    stats.report = told.append
    stats.begin_attempt(num_ranks)
    return stats, told


def note(stats: RunStats, *records: StepStats, times: int = 1) -> None:
    for _ in range(times):
        for rank, record in enumerate(records):
            stats.note(rank, record)


def test_the_line_says_how_far_the_run_is_how_fast_and_where_its_time_goes() -> None:
    stats, _ = run_of(2)
    assert stats.line() == ""
    note(stats, USUAL, USUAL)
    assert stats.line() == (
        "step 100/1000  85 % compute, 10 % data, 5 % sync  640 samples/s  1:30 left"
    )


def test_a_slow_rank_is_told_once_when_it_has_lasted_and_again_when_it_changes() -> None:
    stats, told = run_of(4)
    note(stats, WAITING, SLOW, WAITING, WAITING, times=3)
    assert told == []
    note(stats, WAITING, SLOW, WAITING, WAITING, times=5)
    sentence = "rank 1 delays all ranks by 30 ms per 130 ms step: its data loader (4.0 times the"
    assert told == [f"{sentence} median)"]
    assert stats.line().endswith("slowest: rank 1 (+30 ms, data)")
    note(stats, WAITING, WAITING, WAITING, SLOW, times=8)
    assert [row[:6] for row in told] == ["rank 1", "rank 3"]
    note(stats, USUAL, USUAL, USUAL, USUAL, times=4)
    assert "slowest" not in stats.line()
    assert len(told) == 2


def test_no_rank_is_slow_before_all_have_told_of_their_steps() -> None:
    stats, told = run_of(5)
    note(stats, WAITING, SLOW, WAITING, WAITING, times=9)
    assert told == []
    stats.begin_attempt(4)
    assert stats.rows() == []


def test_the_machine_of_a_slow_rank_is_named_where_there_are_several() -> None:
    stats, told = run_of(2)
    for _ in range(4):
        stats.note(0, WAITING)
        stats.note(1, SLOW, 1, "n2")
    assert told[0].startswith("rank 1 on n2 delays all ranks")
    slowest = {"rank": 1, "machine": 1, "cost_ms": pytest.approx(30), "cause": "data"}
    assert stats.to_json(str)["slowest"] == slowest


def test_a_lost_machine_is_shown_has_no_rate_and_holds_up_nobody_until_the_next_attempt() -> None:
    stats, told = run_of(2)
    for _ in range(5):
        stats.note(0, WAITING)
        stats.note(1, SLOW, 1, "n2")
    assert stats.slowest is not None
    stats.drop_machine(1)
    assert [(row.is_lost, row.samples_per_s is None) for row in stats.rows()] == [
        *((False, False), (True, True))
    ]
    stats.note(0, WAITING)
    assert stats.line() == (
        "step 100/1000  65 % compute, 19 % data, 15 % sync  246 samples/s  1:57 left  lost: n2"
    )
    assert len(told) == 1
    stats.begin_attempt(1)
    stats.note(0, USUAL)
    stats.note(1, USUAL, 1, "n2")  # told before the loss
    assert [row.is_lost for row in stats.rows()] == [False]


def test_of_a_run_that_stands_still_neither_a_rate_nor_an_end_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats, _ = run_of(1)
    stats.note(0, USUAL)
    later = time.monotonic() + 9
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert stats.line() == "step 100/1000  85 % compute, 10 % data, 5 % sync  no step for 0:09"


def test_all_ranks_that_wait_for_data_are_told_what_to_do_once() -> None:
    stats, told = run_of(2)
    record = USUAL._replace(seconds=4.0, data_s=2.2, num_workers=2)
    note(stats, record, record, times=9)
    assert told == [
        "all ranks wait for data 55 % of the time: raise the DataLoader's num_workers above 2, or "
        "load samples faster"
    ]


def test_a_library_that_tells_its_steps_alone_has_no_shares() -> None:
    stats, told = run_of(1)
    note(stats, USUAL._replace(data_s=0.0, forward_s=0.0, backward_s=0.0, sync_s=0, samples=0))
    assert stats.line() == "step 100/1000  1:30 left"
    (row,) = stats.to_json(str)["ranks"]
    assert row["step_ms"] == pytest.approx(100)
    assert (row["data_share"], row["compute_share"], row["samples_per_s"]) == (None, None, None)
    assert told == []


def test_stats_that_cannot_be_are_left_out_and_a_loss_that_is_no_number_is_none() -> None:
    stats, _ = run_of(1)
    heard: list[tuple[int, StepStats]] = []
    stats.listeners.append(lambda rank, record: heard.append((rank, record)))
    for wrong in (float("nan"), float("inf"), -1.0, 0.0):
        note(stats, USUAL._replace(seconds=wrong), USUAL._replace(num_steps=0))
    assert (stats.rows(), heard) == ([], [])
    stats.note(0, USUAL)
    assert heard == [(0, USUAL)]
    note(stats, USUAL._replace(loss=float("nan")))
    assert json.loads(json.dumps(stats.to_json(str), allow_nan=False))["ranks"][0]["loss"] is None


def test_only_machine_0_tells_how_the_whole_run_is_doing() -> None:
    stats, _ = run_of(2)
    stats.begin_attempt(2, machine=1)
    stats.note(1, USUAL)
    assert stats.line() == ""
    assert [row.machine for row in stats.rows()] == [1]


def plain(stats: StepStats) -> StepStats:
    """Return what a script without an Accelerator tells of the same steps."""
    return stats._replace(data_s=0.0, forward_s=0.0, backward_s=0.0, samples=0, total=0)


@pytest.mark.parametrize("sync_s", [0.0, 0.7])  # of a call of ours that all ranks make
def test_of_a_plain_script_steps_are_told_and_no_rank_is_slow(sync_s: float) -> None:
    stats, told = run_of(2)
    one = plain(USUAL)._replace(sync_s=sync_s)
    note(stats, one, one._replace(stolen_s=1.0, sync_s=0.0), times=9)
    assert stats.line() == "step 100"
    assert told == []
    row = stats.rows()[0]
    assert (row.sync_share, row.data_share, row.compute_share) == (None, None, None)
    assert row.step_ms == pytest.approx(100)


def test_steps_that_are_told_late_change_how_far_the_run_is_and_nothing_else() -> None:
    stats, _ = run_of(2)
    note(stats, USUAL._replace(step=80), USUAL, times=2)
    before = stats.rows()
    stats.note(0, USUAL.empty_at(103, 0.25))
    row, other = stats.rows()
    assert (row.step, row.loss) == (103, 0.25)
    assert row.age_s < 9
    assert row._replace(step=80, loss=0.5, age_s=0) == before[0]._replace(age_s=0)
    assert other.step == 100
    stats.begin_attempt(2)
    stats.note(0, USUAL.empty_at(103, 0.25))  # its records came before this attempt
    assert stats.rows() == []


EVEN = Times(step=0.1, data=0.01, forward=0.03, backward=0.05, sync=0.005)


def with_a_slow(rank: int, cost: float, *, size: float = 4, **more: float) -> dict[int, Times]:
    """Return what steps take where one rank spends `cost` seconds more in the named places."""
    step = EVEN.step + cost
    times = {rank: EVEN._replace(step=step, sync=EVEN.sync + cost) for rank in range(int(size))}
    slow = EVEN._replace(step=step)
    times[rank] = slow._replace(**{name: getattr(slow, name) + s for name, s in more.items()})
    return times


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("cause", ["data", "forward", "backward", "save", "machine"])
def test_the_rank_that_all_wait_for_is_named_with_its_cost_and_cause(cause: str, size: int) -> None:
    found = find_slow_rank(with_a_slow(1, 0.04, size=size, **{cause: 0.04}))
    assert found is not None
    assert (found.rank, found.cause) == (1, cause)
    assert found.cost_s == pytest.approx(0.04)


TIMES = with_a_slow(2, 0.04, data=0.04)


@pytest.mark.parametrize(
    "times",
    [
        with_a_slow(2, 0.0105, data=0.0105),
        {rank: Times(*(time / 100 for time in times)) for rank, times in TIMES.items()},
        {**TIMES, 1: TIMES[2]},
        {0: EVEN},
        {},
    ],
    ids=["a tenth of a step", "half a millisecond", "two slow ranks", "a single rank", "no rank"],
)
def test_nobody_is_named_for_little_or_where_two_hold_up_the_others(
    times: dict[int, Times],
) -> None:
    assert find_slow_rank(times) is None


def test_no_cause_is_named_for_what_the_rank_does_in_two_places() -> None:
    for more, cause in (({}, "script"), ({"data": 0.02, "forward": 0.02}, None)):
        found = find_slow_rank(with_a_slow(0, 0.04, **more))
        assert found is not None
        assert found.cause == cause
        assert ("other work in the script" in found.describe()) == (not more)


def test_a_busy_core_is_the_cause_though_the_passes_take_longer_by_it() -> None:
    found = find_slow_rank(with_a_slow(3, 0.04, forward=0.035, machine=0.038))
    assert found is not None
    assert found.cause == "machine"


def test_a_rank_that_was_last_once_is_not_named() -> None:
    even = dict.fromkeys(range(4), EVEN)
    slow = with_a_slow(2, 0.5, data=0.5)
    assert find_persistent_slow_rank([even, slow, even, even]) is None
    assert find_persistent_slow_rank([slow, slow, with_a_slow(1, 0.5, data=0.5), slow]) is None
    assert find_persistent_slow_rank([slow] * 4) == find_slow_rank(slow)
    assert find_persistent_slow_rank([]) is None


def test_the_sentence_says_who_waits_for_how_long_and_why() -> None:
    slow = SlowRank(5, cost_s=0.038, step_s=0.12, cause="data", ratio=3.14)
    assert slow.describe("n2") == (
        "rank 5 on n2 delays all ranks by 38 ms per 120 ms step: its data loader (3.1 times the "
        "median)"
    )
    unknown = SlowRank(0, cost_s=0.0012, step_s=0.0062, cause=None)
    assert unknown.describe().startswith("rank 0 delays all ranks by 1.2 ms per 6.2 ms step: ")


def test_records_become_the_mean_step() -> None:
    record = StepStats(9, 4, 0.4, 0.04, 0.08, 0.12, 0.02, 0.0, 32, 1, None, 0, None, None, 0.012)
    times = mean_step([record, record._replace(num_steps=6, seconds=0.6)])
    assert times.step == pytest.approx(0.1)
    assert times.machine == pytest.approx(0.0024)


seconds = st.floats(0, 10, allow_nan=False)


@given(st.lists(st.builds(Times, *[seconds] * 7), min_size=2, max_size=8))
def test_whatever_the_stats_a_name_needs_a_tenth_of_a_step(parts: list[Times]) -> None:
    found = find_slow_rank(dict(enumerate(parts)))
    if found is not None:
        assert found.cost_s >= MIN_SHARE * found.step_s
        assert parts[found.rank].sync == min(part.sync for part in parts)
        if found.cause is not None:
            others = [getattr(part, found.cause) for part in parts]
            assert getattr(parts[found.rank], found.cause) > min(others)


@given(st.lists(st.floats(-0.0045, 0.0045), min_size=2, max_size=8), seconds)
def test_ranks_that_differ_by_less_than_a_tenth_of_a_step_are_never_named(
    noise: list[float], wait: float
) -> None:
    times = {
        rank: EVEN._replace(sync=0.0045 + wait + more, step=0.1 + wait, data=0.01 - more)
        for rank, more in enumerate(noise)
    }
    assert find_slow_rank(times) is None
