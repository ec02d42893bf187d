"""gather_for_metrics gives each sample once, in order, for every length, batch size and mode."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).with_name("metrics_worker.py")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "choice",
    ["tenth", pytest.param("all", marks=[pytest.mark.long, pytest.mark.timeout(3600)])],
)
def test_gather_for_metrics_gives_each_sample_once_in_order(
    world: int, choice: str, tmp_path: Path
) -> None:
    seed = random.randrange(10**6)
    ranks = run_ranks(world, tmp_path, WORKER, choice, str(seed), limit_s=3500)
    assert not isinstance(ranks, str), ranks
    assert [rank["wrong"] for rank in ranks] == [[]] * world, f"with seed {seed}"
