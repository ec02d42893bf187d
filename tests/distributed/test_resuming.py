"""Ranks go on in the middle of an epoch, as many as before or more or fewer."""

from __future__ import annotations

import math
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import launching
from tests.distributed.ranks import environment, run_ranks
from tests.distributed.resuming_cases import ANY_RANKS, SAME_RANKS, Case

pytest.importorskip("torch")
pytestmark = pytest.mark.distributed
WORKER = Path(__file__).with_name("resuming_worker.py")
KILLED = Path(__file__).with_name("killed_training.py")
LONG = pytest.mark.long
Trained = dict[str, Any]


def run(world: int, folder: Path, *words: str) -> list[Any]:
    seen = run_ranks(world, folder, WORKER, *words, limit_s=400)
    assert not isinstance(seen, str), seen
    return seen


def require_the_same(resumed: Trained, whole: Trained) -> None:
    steps = resumed["steps"]
    assert len(steps) > 1
    assert steps == whole["steps"][-len(steps) :]
    assert resumed["weights"] == whole["weights"]


def require_every_sample_once(resumed: Trained, begun: Trained, case: Case) -> None:
    seen = [of_all for _, _, of_all in begun["steps"][: case.at] + resumed["steps"]]
    samples = list(chain.from_iterable(seen))
    for epoch in (samples[: case.size], samples[case.size :]):
        assert Counter(epoch) == Counter(map(float, range(case.size)))


def require_nearly_equal_weights(resumed: Trained, whole: Trained) -> None:
    for one, other in zip(resumed["weights"], whole["weights"], strict=True):
        for a, b in zip(one, other, strict=True):
            assert math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6)


def require_that_each_goes_on_from_the_others(
    pairs: list[tuple[int, int]], whole: dict[int, list[Any]], folder: Path
) -> None:
    """Let the second number of ranks of each pair go on from the checkpoints of the first."""
    for after in sorted({after for _, after in pairs}):
        befores = sorted(before for before, to in pairs if to == after)
        resumed = run(after, folder, "from", *map(str, befores))
        for before in befores:
            for name, case in ANY_RANKS.items():
                found, begun = resumed[0][f"{before} {name}"], whole[before][0][name]
                require_every_sample_once(found, begun, case)
                if case.size % 12 == 0:
                    require_nearly_equal_weights(found, begun)


def test_two_ranks_go_on_bit_for_bit_and_others_see_each_sample_once(tmp_path: Path) -> None:
    whole = run(2, tmp_path, "again")
    for name in SAME_RANKS:
        for rank in whole:
            require_the_same(rank[name][1], rank[name][0])
    require_that_each_goes_on_from_the_others([(2, 1), (2, 3)], {2: whole}, tmp_path)


def run_with_kills(folder: Path, kills: int, *words: int) -> None:
    """Run `killed_training.py` with these ranks, workers, accumulation steps and seed."""
    ranks, workers, accumulation, seed = words
    numbers = map(str, (ranks, workers, accumulation, kills, seed))
    command = [sys.executable, str(KILLED), str(folder), *numbers]
    limit_s = 800  # for many kills; of few, the test has its own limit
    ended = launching.run(command, environment(0, 1, 0), timeout_s=limit_s)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.split() == [str(kills)]


@pytest.mark.parametrize("words", [(1, 0, 1, 1), (3, 2, 3, 2)], ids=str)
def test_a_run_under_kills_ends_as_one_without(words: tuple[int, ...], tmp_path: Path) -> None:
    run_with_kills(tmp_path, 5, *words)


@LONG
@pytest.mark.timeout(2700)  # each of three runs may take the time that `run_with_kills` gives it
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_run_under_many_kills_ends_as_one_without(
    ranks: int, workers: int, accumulation: int, tmp_path: Path
) -> None:
    for seed in (1, 2, 3):
        run_with_kills(tmp_path / str(seed), 6, ranks, workers, accumulation, seed)


@LONG
def test_any_number_of_ranks_goes_on_from_any_other(tmp_path: Path) -> None:
    worlds = (1, 2, 3, 4)
    whole = {world: run(world, tmp_path, "whole") for world in worlds}
    pairs = [(before, after) for before in worlds for after in worlds if before != after]
    require_that_each_goes_on_from_the_others(pairs, whole, tmp_path)
