"""A rank that holds up the others is named with its cause; see `slow_ranks` for many trials."""

from __future__ import annotations

import pytest

from tests.distributed.slow_ranks import Trial, can_make_groups, run_trial

pytestmark = [pytest.mark.distributed, pytest.mark.long]


@pytest.mark.parametrize(
    "trial",
    [
        *(Trial("data", 1, 0.02), Trial("forward", 3, 0.02), Trial("save", 2, 0.1)),
        Trial("data", 2, 0.015, is_plain=True),
    ],
    ids=lambda trial: "plain" if trial.is_plain else trial.place,
)
def test_the_rank_that_is_slow_is_named_with_its_cause(trial: Trial) -> None:
    found = run_trial(trial, seconds=25)
    assert found.is_right(trial), found.output


@pytest.mark.skipif(not can_make_groups(), reason="needs cgroup v1, and root")
def test_a_rank_that_has_used_up_its_cpu_quota_is_named_so() -> None:
    trial = Trial("quota", 1, 0.25)
    found = run_trial(trial, seconds=25)
    assert found.is_right(trial), found.output


@pytest.mark.parametrize("is_plain", [False, True])
def test_of_equal_ranks_none_is_named(is_plain: bool) -> None:
    found = run_trial(Trial("none", 0, 0.0, is_plain), seconds=25)
    assert found.names == [], found.output
