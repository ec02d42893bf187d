"""Which results belong to samples of the data set."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.data.active_loader import GlobalBatch, LoaderLoop


def kept(*batches: tuple[GlobalBatch, Any], ranks: int = 1) -> Any:
    """Return what is left of the last batch's results, after the batches before it."""
    loop = LoaderLoop()
    result: Any = None
    for number, (batch, gathered) in enumerate(batches, start=1):
        loop.begin_batch(batch, is_last=number == len(batches))
        result = loop.drop_repeats(gathered, ranks)
    loop.end()
    return result


FULL, LAST = GlobalBatch(8, 8, 8), GlobalBatch(1, 2, 8)  # two ranks with four samples each


@pytest.mark.parametrize(
    ("usual", "last", "left"),
    [
        (8, [1, 1], [1]),  # one result for a sample
        (16, [1, 2, 3, 4], [1, 2]),  # two
        (8, [1, 2, 3, 4, 5, 6, 7, 8], [1]),  # loss.repeat(batch_size)
        (32, [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4]),  # four results for a sample
        (2, [1, 2], [1, 2]),  # one result for a rank
        (5, [1, 2], [1, 2]),  # nothing to do with samples
    ],
)
def test_the_first_batch_says_what_results_are_of(
    usual: int, last: list[int], left: list[int]
) -> None:
    assert kept((FULL, [0] * usual), (LAST, last), ranks=2) == left
    found = kept((FULL, torch.zeros(usual)), (LAST, torch.tensor(last)), ranks=2)
    assert found.tolist() == left


def test_repeated_losses_are_cut_on_each_rank() -> None:
    short = GlobalBatch(4, 4, 8)
    assert kept((FULL, [0] * 8), (short, list("aaaabbbb")), ranks=2) == list("aabb")


def test_collated_lengths_that_are_not_the_samples_cut_nothing() -> None:
    packed = GlobalBatch(1, 1, 4)  # four samples in one row
    assert kept((packed, [0] * 4), (packed, [1, 2, 3, 4])) == [1, 2, 3, 4]


def test_what_is_no_sequence_of_results_is_left_alone() -> None:
    assert kept((GlobalBatch(3, 3, 4), {"loss": 1})) == {"loss": 1}
    assert kept((GlobalBatch(3, 3, 4), torch.tensor(1.0))).item() == 1.0
