"""Which results belong to samples of the data set, by their number alone; on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.data.active_loader import GlobalBatch, LoaderLoop
from headway.errors import UsageError
from headway.training.metrics import gather_for_metrics

FULL, SHORT = GlobalBatch(8, 8, 8), GlobalBatch(1, 2, 8)  # the second of two samples is a repeat


def kept(loop: LoaderLoop, *numbers: int) -> list[int]:
    """Return how many of so many results are left, the same of tensors and of lists."""
    rows = [torch.arange(number) for number in numbers]
    as_tensors, as_lists = gather_for_metrics((rows, tuple(row.tolist() for row in rows)))
    assert [tensor.tolist() for tensor in as_tensors] == [*as_lists]
    return [len(tensor) for tensor in as_tensors]


@pytest.mark.parametrize(
    ("of_full", "of_short", "left"),
    [
        ([], [2, 4, 6], [1, 2, 3]),
        ([8], [8], [1]),  # results.repeat(batch_size)
        ([16, 32], [8], [4]),  # four for each sample
        ([], [6, 0], [3, 0]),
    ],
)
def test_repeated_samples_lose_their_results(
    of_full: list[int], of_short: list[int], left: list[int]
) -> None:
    loop = LoaderLoop()
    loop.begin_batch(FULL)
    assert kept(loop, *of_full) == of_full
    loop.begin_batch(SHORT)
    assert kept(loop, *of_short) == left
    loop.end()


@pytest.mark.parametrize("of_full", [[], [8, 32]])
def test_as_many_results_as_a_full_batch_has_are_refused_if_they_may_be_several_for_each_sample(
    of_full: list[int],
) -> None:
    loop = LoaderLoop()
    loop.begin_batch(FULL)
    assert kept(loop, *of_full) == of_full
    loop.begin_batch(SHORT)
    for results in (torch.tensor(0.5).repeat(8), torch.arange(8)):
        with pytest.raises(UsageError, match=r"8 results(.|\n)*pass one(.|\n)*reshape\(2, 4, "):
            gather_for_metrics(results)
        assert len(gather_for_metrics(results, strict=False)) == 1
    assert len(gather_for_metrics(torch.arange(8).reshape(2, 4))) == 1
    loop.begin_batch(GlobalBatch(3, 3, 8))  # of which eight are no multiple
    assert gather_for_metrics(torch.arange(8)).tolist() == [0, 1, 2]
    boxes_of_images = [torch.ones(8), torch.ones(5), torch.ones(8)]
    with pytest.raises(UsageError, match=r"one tensor per sample(.|\n)*use_gather_object=True"):
        gather_for_metrics(boxes_of_images)
    assert len(gather_for_metrics(boxes_of_images, use_gather_object=True)) == 3
    loop.end()


def passed(*batches: GlobalBatch) -> None:
    loop = LoaderLoop(object())
    for batch in batches:
        loop.begin_batch(batch)
    loop.end()


def test_results_of_a_whole_pass_lose_the_repeats_at_its_end() -> None:
    outer = LoaderLoop(object())
    outer.begin_batch(GlobalBatch(7, 7, 7))
    passed(FULL, FULL, SHORT)
    assert kept(outer, 18, 7) == [17, 7]
    outer.begin_batch(GlobalBatch(9, 9, 9))
    assert kept(outer, 18) == [18]  # two for each sample: the other pass was in an earlier batch
    passed(SHORT, GlobalBatch(7, 7, 7))  # its repeats are not at its end
    assert kept(outer, 9) == [9]
    passed(GlobalBatch(8, 9, 9))
    with pytest.raises(UsageError, match="the last batch or to the epoch"):
        kept(outer, 9)
    outer.end()
    assert kept(outer, 16) == [16]
    with pytest.raises(UsageError, match="of the epoch"):
        kept(outer, 8)
    passed()  # of which this rank had no part
    assert kept(outer, 0) == [0]


@pytest.mark.parametrize("results", [torch.ones(3), ["a"], {"loss": 0.5}, "text", ([1], "a")])
def test_results_that_are_not_for_samples_are_refused(results: Any) -> None:
    loop = LoaderLoop()
    loop.begin_batch(FULL)
    with pytest.raises(UsageError, match=r"has 8 samples(.|\n)*gather\(...\).*gather_obj"):
        gather_for_metrics(results)
    loop.end()


def test_scalars_none_and_collated_tuples_of_text_are_gathered() -> None:
    loop = LoaderLoop()
    loop.begin_batch(SHORT)
    found = gather_for_metrics({"loss": torch.tensor(1.0), "no": None, "text": ("a", "b")})
    assert found == {"loss": torch.ones(1), "no": None, "text": ["a"]}
    loop.end()
