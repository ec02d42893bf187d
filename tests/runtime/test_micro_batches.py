"""micro_batches in one process; with several ranks in tests/distributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from headway import Accelerator
from headway.errors import OutOfMemory, UsageError

Batch = dict[str, Any]


def train(accelerator: Accelerator, limit: int, **sizes: int) -> list[list[int]]:
    """Return the samples of the parts that were tried in two batches of eight."""
    model, seen = accelerator.prepare(torch.nn.Linear(1, 1)), []
    for _ in range(2):
        parts = []
        batch = {"x": torch.ones(8, 1), "names": list("abcdefgh"), "scale": torch.tensor(2.0)}
        for part in accelerator.micro_batches(batch, **sizes):
            parts.append(len(part["x"]))
            assert len(part["names"]) == parts[-1]
            with accelerator.accumulate(model):
                if parts[-1] > limit:
                    raise RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB)")
                accelerator.backward((model(part["x"]) * part["scale"]).mean())
        assert model.weight.grad.item() == pytest.approx(2.0)
        assert accelerator.sync_gradients
        model.zero_grad()
        seen.append(parts)
    return seen


def test_the_size_that_was_found_stays() -> None:
    accelerator = Accelerator(cpu=True, auto_micro_batch=True)
    assert train(accelerator, 3) == [[8, 4, 2, 2, 2, 2], [2, 2, 2, 2]]


def test_parts_have_a_largest_and_a_smallest_size() -> None:
    assert train(Accelerator(cpu=True, auto_micro_batch=True), 9, max_size=5) == [[5, 3], [5, 3]]
    with pytest.raises(OutOfMemory):
        train(Accelerator(cpu=True, auto_micro_batch=True), 1, min_size=2)


def test_without_the_argument_a_batch_is_one_part_and_errors_are_passed_on() -> None:
    assert train(Accelerator(cpu=True), 8) == [[8], [8]]
    with pytest.raises(RuntimeError, match="MPS backend"):
        train(Accelerator(cpu=True), 4)


def test_other_errors_are_passed_on_and_a_loop_without_accumulate_is_refused() -> None:
    accelerator = Accelerator(cpu=True, auto_micro_batch=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    for part in accelerator.micro_batches(torch.ones(2, 1)):
        with pytest.raises(UsageError):
            accelerator.backward(model(part).mean())
        with pytest.raises(KeyError), accelerator.accumulate(model):
            raise KeyError
        break
    accelerator.backward(model(torch.ones(1, 1)).mean())


def test_gradients_of_earlier_batches_are_kept_when_memory_runs_out() -> None:
    accelerator = Accelerator(cpu=True, auto_micro_batch=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    for value, limit in ((1.0, 9), (3.0, 2)):
        for part in accelerator.micro_batches(torch.full((4, 1), value)):
            with accelerator.accumulate(model):
                if len(part) > limit:
                    raise torch.OutOfMemoryError
                accelerator.backward(model(part).mean())
    assert model.weight.grad.item() == pytest.approx((1.0 + 3.0) / 2)


def test_batches_may_be_dataclasses_or_begin_with_text() -> None:
    @dataclass
    class Example:
        x: torch.Tensor
        names: list[str]

    accelerator = Accelerator(cpu=True, auto_micro_batch=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    batch = {"source": "a file", "example": Example(torch.ones(3, 1), ["a", "b", "c"])}
    seen = []
    for part in accelerator.micro_batches(batch, max_size=2):
        seen.append((len(part["example"].x), part["example"].names))
        with accelerator.accumulate(model):
            accelerator.backward(model(part["example"].x).mean())
    assert seen == [(2, ["a", "b"]), (1, ["c"])]


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        (torch.ones(2, 1), {"max_size": -1}),
        (torch.ones(2, 1), {"max_size": 0}),
        (torch.ones(2, 1), {"min_size": 0}),
        (torch.ones(0, 1), {}),
        (["only", "text"], {}),
    ],
)
def test_sizes_below_one_and_batches_without_samples_are_refused(
    batch: Any, sizes: dict[str, int]
) -> None:
    with pytest.raises(UsageError):
        list(Accelerator(cpu=True, auto_micro_batch=True).micro_batches(batch, **sizes))
