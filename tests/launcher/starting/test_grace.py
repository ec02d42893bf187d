"""How long ranks may take to stop."""

from __future__ import annotations

import pytest

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
    pytest.importorskip("torch")
    from headway.launcher.starting.agent import victim_grace_s

    settings = resolve([environment_layer(variables)], load("gpu_8_h100"), {})
    assert victim_grace_s(settings) == seconds
