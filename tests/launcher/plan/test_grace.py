"""How long ranks may take to stop."""

from __future__ import annotations

import pytest

from headway.launcher.plan.supervision import grace_of
from headway.settings.layers import environment_layer
from headway.settings.resolve import resolve
from tests.machines.recorded import load


@pytest.mark.parametrize(
    ("variables", "seconds"),
    [
        ({}, 5),
        ({"HEADWAY_GRACE_PERIOD_S": "60"}, 60),
        ({"HEADWAY_GRACE_PERIOD_S": "30"}, 30),  # as the default, but explicit
        ({"HEADWAY_GRACE_PERIOD_S": "0"}, 0),
    ],
)
def test_an_explicit_grace_period_holds_for_the_victims_of_another_rank_too(
    variables: dict[str, str], seconds: int
) -> None:
    settings = resolve([environment_layer(variables)], load("gpu_8_h100"), {})
    assert grace_of(settings, {}).victim_s == seconds


@pytest.mark.parametrize(
    ("variables", "job_ends_in_s", "seconds"),
    [
        ({}, None, 600),
        ({}, 3600, 600),
        ({}, 125, 120),
        ({}, 10, 30),  # the usual grace period is tried in any case
        ({"HEADWAY_GRACE_PERIOD_S": "60"}, 3600, 60),
    ],
)
def test_a_save_has_as_long_as_the_job_has(
    variables: dict[str, str], job_ends_in_s: int | None, seconds: int
) -> None:
    settings = resolve([environment_layer(variables)], load("gpu_8_h100"), {})
    now = 1_000_000
    environ = {} if job_ends_in_s is None else {"SLURM_JOB_END_TIME": str(now + job_ends_in_s)}
    assert grace_of(settings, environ).saving_s(now) == seconds
