"""A rank that holds up the others is named with its cause, and of equal ranks none."""

from __future__ import annotations

import pytest

from tests.distributed.slow_ranks import Trial, can_make_groups, run_trial

pytestmark = [pytest.mark.distributed, pytest.mark.long]


@pytest.mark.parametrize(
    "trial",
    [
        *(Trial("data", 1, 0.02), Trial("forward", 3, 0.02), Trial("save", 2, 0.1)),
        pytest.param(
            Trial("quota", 1, 0.25),
            marks=pytest.mark.skipif(not can_make_groups(), reason="needs cgroup v1, and root"),
        ),
        Trial("none", 0, 0.0),
    ],
    ids=lambda trial: trial.place,
)
def test_the_rank_that_is_slow_is_named_with_its_cause_and_no_other(trial: Trial) -> None:
    found = run_trial(trial, seconds=25)
    assert found.is_right(trial), found.output
