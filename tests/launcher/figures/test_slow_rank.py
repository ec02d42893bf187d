"""Which rank is said to hold up the others, by numbers alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.contract.records import Figures
from headway.launcher.figures.slow_rank import (
    LEAST_SHARE,
    SlowRank,
    Times,
    find_lasting,
    find_slow_rank,
    times_of,
)

USUAL = Times(step=0.1, data=0.01, forward=0.03, backward=0.05, sync=0.005)


def with_a_slow(rank: int, cost: float, *, size: float = 4, **more: float) -> dict[int, Times]:
    """Return what steps take where one rank spends `cost` seconds more in the named places."""
    step = USUAL.step + cost
    times = {one: USUAL._replace(step=step, sync=USUAL.sync + cost) for one in range(int(size))}
    slow = USUAL._replace(step=step)
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
        {rank: Times(*(one / 100 for one in times)) for rank, times in TIMES.items()},
        {**TIMES, 1: TIMES[2]},
        {0: USUAL},
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
        assert ("what its script does besides" in found.describe()) == (not more)


def test_a_busy_core_is_the_cause_though_the_passes_take_longer_by_it() -> None:
    found = find_slow_rank(with_a_slow(3, 0.04, forward=0.035, machine=0.038))
    assert found is not None
    assert found.cause == "machine"


def test_a_rank_that_was_last_once_is_not_named() -> None:
    even = dict.fromkeys(range(4), USUAL)
    slow = with_a_slow(2, 0.5, data=0.5)
    assert find_lasting([even, slow, even, even]) is None
    assert find_lasting([slow, slow, with_a_slow(1, 0.5, data=0.5), slow]) is None
    assert find_lasting([slow] * 4) == find_slow_rank(slow)
    assert find_lasting([]) is None


def test_the_sentence_says_who_waits_for_how_long_and_why() -> None:
    slow = SlowRank(5, cost_s=0.038, step_s=0.12, cause="data", ratio=3.14)
    assert slow.describe("n2") == (
        "rank 5 on n2 makes all others wait 38 ms of each 120 ms: its data loader (3.1 times the "
        "median)"
    )
    unknown = SlowRank(0, cost_s=0.0012, step_s=0.0062, cause=None)
    assert unknown.describe().startswith("rank 0 makes all others wait 1.2 ms of each 6.2 ms: ")


def test_records_become_the_mean_step() -> None:
    record = Figures(9, 4, 0.4, 0.04, 0.08, 0.12, 0.02, 0.0, 32, 1, None, 0, None, None, 0.012)
    times = times_of([record, record._replace(num_steps=6, seconds=0.6)])
    assert times is not None
    assert times.step == pytest.approx(0.1)
    assert times.machine == pytest.approx(0.0024)
    assert times_of([]) is None


seconds = st.floats(0, 10, allow_nan=False)


@given(
    st.lists(st.builds(Times, *[seconds] * 7), min_size=2, max_size=8),
)
def test_whatever_the_figures_a_name_needs_a_tenth_of_a_step(parts: list[Times]) -> None:
    found = find_slow_rank(dict(enumerate(parts)))
    if found is not None:
        assert found.cost_s >= LEAST_SHARE * found.step_s
        assert parts[found.rank].sync == min(one.sync for one in parts)
        if found.cause is not None:
            others = [getattr(one, found.cause) for one in parts]
            assert getattr(parts[found.rank], found.cause) > min(others)


@given(
    st.lists(st.floats(-0.0045, 0.0045), min_size=2, max_size=8),
    seconds,
)
def test_ranks_that_differ_by_less_than_a_tenth_of_a_step_are_never_named(
    noise: list[float], wait: float
) -> None:
    times = {
        rank: USUAL._replace(sync=0.0045 + wait + more, step=0.1 + wait, data=0.01 - more)
        for rank, more in enumerate(noise)
    }
    assert find_slow_rank(times) is None
