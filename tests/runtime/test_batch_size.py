"""find_executable_batch_size in one process; with several ranks in tests/distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.errors import OutOfMemory, UsageError, WrongType
from headway.utils import find_executable_batch_size

ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
)


def sizes_tried(limit: int, error: BaseException = ERRORS[0], **options: Any) -> list[int]:
    tried = []

    @find_executable_batch_size(**options)
    def train(batch_size: int, step: int, *, by: int = 0) -> int:
        tried.append(batch_size)
        if batch_size > limit:
            raise error
        return batch_size + step + by

    assert train(100, by=1000) == tried[-1] + 1100
    return tried


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_the_batch_size_is_halved_until_memory_suffices(error: BaseException) -> None:
    assert sizes_tried(20, error) == [128, 64, 32, 16]


def test_sizes_follow_a_factor_or_a_function_where_one_is_given() -> None:
    assert sizes_tried(80, starting_batch_size=100, factor=0.9) == [100, 90, 81, 72]
    next_size = iter((5, 3)).__next__
    assert sizes_tried(3, starting_batch_size=9, reduce_batch_size_fn=next_size) == [9, 5, 3]


def test_a_real_allocation_that_fails_is_recognised() -> None:
    def allocate(batch_size: int) -> int:
        torch.empty(batch_size, 1 << 60 if batch_size > 1 else 1, dtype=torch.uint8)
        return batch_size

    assert find_executable_batch_size(allocate, 2)() == 1


@pytest.mark.parametrize(
    "error", [ValueError(128), RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED: 128")]
)
def test_other_errors_are_passed_on_and_the_size_stays(error: Exception) -> None:
    def fail(batch_size: int) -> None:
        raise error

    with pytest.raises(type(error), match="128"):
        find_executable_batch_size(fail)()


def test_a_size_of_zero_is_an_error() -> None:
    with pytest.raises(OutOfMemory) as refusal:
        sizes_tried(0, starting_batch_size=3)
    assert isinstance(refusal.value, RuntimeError)


def test_a_batch_size_that_the_script_passes_is_refused() -> None:
    def train(batch_size: int, name: str) -> None: ...

    with pytest.raises(WrongType, match=r"train\(name='tiny'\)"):
        find_executable_batch_size(train)(64, "tiny")


@pytest.mark.parametrize(
    "options",
    [{"factor": 1.0}, {"reduce_batch_size_fn": lambda: 128}],
    ids=["factor 1", "function that repeats a size"],
)
def test_sizes_that_do_not_fall_are_refused(options: dict[str, Any]) -> None:
    attempts = []

    @find_executable_batch_size(**options)
    def train(batch_size: int) -> None:
        attempts.append(batch_size)
        raise ERRORS[0] if len(attempts) < 3 else AssertionError

    with pytest.raises(UsageError):
        train()
