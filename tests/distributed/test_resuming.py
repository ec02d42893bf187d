"""Several ranks go on in the middle of an epoch, as many as before or more or fewer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import run_ranks

pytest.importorskip("torch")
pytestmark = pytest.mark.distributed
WORKER = Path(__file__).with_name("resuming_worker.py")


def run(world: int, folder: Path, *words: str) -> list[Any]:
    folder.mkdir()
    seen = run_ranks(world, folder, WORKER, *words)
    assert not isinstance(seen, str), seen
    return seen


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("at", "words"),
    [
        (8, ("--accumulation", "3")),  # between two optimizer steps
        (3, ("--workers", "2")),
        pytest.param(4, (), marks=LONG),
        pytest.param(4, ("--dispatch",), marks=LONG),
        pytest.param(9, ("--split",), marks=LONG),
    ],
    ids=str,
)
def test_two_ranks_go_on_bit_for_bit(at: int, words: tuple[str, ...], tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    common = ("--at", str(at), *words)
    whole = run(2, tmp_path / "whole", "--save", saved, *common)
    resumed = run(2, tmp_path / "resumed", "--load", saved, *common)
    for one, other in zip(resumed, whole, strict=True):
        assert len(one) > 1
        assert one == other[at:]


PAIRS = [(2, 1), (2, 3)]
ALL_PAIRS = [(one, other) for one in (1, 2, 3, 4) for other in (1, 2, 3, 4) if one != other]


def require_every_sample_once(before: int, after: int, tmp_path: Path, *words: str) -> None:
    saved = str(tmp_path / "saved")
    whole = run(before, tmp_path / "whole", "--save", saved, "--at", "2", *words)
    resumed = run(after, tmp_path / "resumed", "--load", saved, "--at", "2", *words)
    ledger: Counter[float] = Counter()
    for _, _, _, of_all in whole[0][:2] + resumed[0][:-1]:
        ledger.update(of_all)
    assert ledger == Counter({float(index): 2 for index in range(41)})
    first = whole[0][:2]
    seen = [index for _, _, _, of_all in first for index in of_all]
    for step in resumed[0][:-1]:
        if len(seen) < 41:
            seen += step[-1]
    assert sorted(seen) == list(range(41))  # of the first epoch


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_another_number_of_ranks_sees_every_sample_once(
    before: int, after: int, tmp_path: Path
) -> None:
    require_every_sample_once(before, after, tmp_path)


@LONG
@pytest.mark.parametrize("words", [(), ("--workers", "2"), ("--dispatch",)], ids=str)
@pytest.mark.parametrize(("before", "after"), ALL_PAIRS)
def test_any_number_of_ranks_sees_every_sample_once(
    before: int, after: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    require_every_sample_once(before, after, tmp_path, *words)
