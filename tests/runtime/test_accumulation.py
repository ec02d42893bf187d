"""When gradients are due, for several models and for parts of a batch; without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.data.active_loader import GlobalBatch, LoaderLoop
from headway.errors import UsageError
from headway.training.accumulation import Accumulation, GradientAccumulationPlugin

ONE, TWO = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)


def accumulation(steps: int, *, with_loader: bool = True) -> Accumulation:
    return Accumulation(steps, GradientAccumulationPlugin(steps, sync_with_dataloader=with_loader))


def due(counts: Accumulation, *parts: int, models: tuple[Any, ...] = (ONE,)) -> list[str]:
    """Return which micro-batches end a step (+) in a pass over batches of so many parts each."""
    loop, seen = LoaderLoop(object()), []
    try:
        for number, of_batch in enumerate(parts, start=1):
            loop.begin_batch(GlobalBatch(1, 1, 1, is_last=number == len(parts)))
            marks = ""
            for _ in range(of_batch):
                counts.begin_micro_batch(models, lambda: [ONE, TWO])
                marks += "+" if counts.sync_gradients else "-"
            seen.append(marks)
    finally:
        loop.end()
    return seen


@pytest.mark.parametrize(
    ("steps", "parts", "expected"),
    [
        (2, (1, 1, 1), ["-", "+", "+"]),  # the last batch ends its step
        (4, (4, 4), ["---+", "---+"]),
        (4, (2, 2, 2), ["--", "-+", "-+"]),
        (3, (2, 2), ["--", "++"]),
        (4, (2, 3), ["--", "-++"]),
        (1, (2, 3), ["++", "+++"]),
    ],
)
def test_the_last_batch_has_as_many_parts_as_the_one_before(
    steps: int, parts: tuple[int, ...], expected: list[str]
) -> None:
    assert due(accumulation(steps), *parts) == expected


@pytest.mark.parametrize("parts", [(2,), (2, 4), (3, 3, 1)])
def test_parts_with_which_the_end_of_a_step_is_unknown_are_refused(parts: tuple[int, ...]) -> None:
    counts = accumulation(4)
    with pytest.raises(UsageError, match="sync_with_dataloader=False"):
        _ = due(counts, *parts), due(counts, 1)


def test_without_the_end_of_loaders_all_parts_count_on() -> None:
    counts = accumulation(4, with_loader=False)
    assert due(counts, 2, 1, 2) + due(counts, 3) == ["--", "-", "+-", "--+"]


def test_each_set_of_models_has_a_count_of_its_own() -> None:
    counts, loop, seen = accumulation(2), LoaderLoop(object()), []
    for number in range(3):
        loop.begin_batch(GlobalBatch(1, 1, 1, is_last=number == 2))
        for models in ((ONE,), (TWO,), (TWO, ONE), (ONE, TWO), ()):
            counts.begin_micro_batch(models, lambda: [ONE, TWO])
            seen.append((models, counts.sync_gradients))
    loop.end()
    assert [is_due for models, is_due in seen if models == (ONE,)] == [False, True, True]
    assert [is_due for models, is_due in seen if models == (TWO,)] == [False, True, True]
    together = [is_due for models, is_due in seen if len(models) != 1]  # one set, in three ways
    assert together == [False, True, False, True, False, True, False, True, True]


def test_the_counts_of_all_sets_continue_after_a_resume() -> None:
    counts, resumed = accumulation(3, with_loader=False), accumulation(3, with_loader=False)
    due(counts, 1, models=(ONE,))
    due(counts, 2, models=(TWO,))
    resumed.load_state_dict(counts.state_dict())
    assert resumed.is_open
    assert due(resumed, 2, models=(TWO,)) == ["+-"]
    assert due(resumed, 2, models=(ONE,)) == ["-+"]
