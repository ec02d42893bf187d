"""What ranks took of their GPUs is read from torch as it is, and told of in one line."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from headway.contract.memory_use import describe_memory_use, read_memory_use, size
from headway.contract.records import MemoryUse

GIB = 2**30


def torch_with(peaks: dict[int, tuple[int, int]]) -> SimpleNamespace:
    """Return a stand-in for torch that has held so much of each GPU; with none, no CUDA."""
    cuda = SimpleNamespace(
        is_initialized=lambda: bool(peaks),
        device_count=lambda: len(peaks),
        max_memory_allocated=lambda gpu: peaks[gpu][0],
        max_memory_reserved=lambda gpu: peaks[gpu][1],
    )
    return SimpleNamespace(cuda=cuda)


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        ({}, None),
        ({0: (0, 0)}, None),
        ({0: (0, 0), 1: (3, 4), 2: (1, 9)}, MemoryUse(3, 4)),
    ],
)
def test_the_gpu_that_a_process_has_used_most_is_read(
    peaks: dict[int, tuple[int, int]], expected: MemoryUse | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_with(peaks))
    assert read_memory_use() == expected


def test_a_process_without_torch_has_used_none_and_does_not_import_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert read_memory_use() is None
    assert "torch" not in sys.modules


@pytest.mark.wording
def test_the_line_has_the_highest_of_all_ranks() -> None:
    ranks = {0: MemoryUse(59 * GIB, 66 * GIB), 3: MemoryUse(60 * GIB, 64 * GIB)}
    assert describe_memory_use(61 * GIB, ranks) == (
        "memory: estimated 61.00 GiB, allocated 60.00 GiB, reserved 64.00 GiB "
        "(highest of 2 ranks: rank 3)"
    )
    assert describe_memory_use(GIB, {0: MemoryUse(2**20, 2**21)}) == (
        "memory: estimated 1.00 GiB, allocated 1.0 MiB, reserved 2.0 MiB"
    )


def test_sizes_are_in_the_unit_that_fits() -> None:
    assert [size(one) for one in (7, 1536, 3 * 2**20, 70 * GIB)] == [
        *("7 B", "1.5 KiB", "3.0 MiB", "70.00 GiB"),
    ]
