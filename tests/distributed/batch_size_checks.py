"""Batch sizes that all ranks settle on; see runtime_worker.py."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.memory import oom as attempts
from headway.utils import find_executable_batch_size, gather
from tests.distributed.this_rank import RANK, WORLD

attempts.GRACE_S = 0.1
LAST = WORLD - 1


def batch_size_of_the_rank_with_least_memory() -> dict[str, Any]:
    """The last rank runs out of memory, in training steps that the others wait for in vain."""
    accelerator = Accelerator()
    tried = []

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size: int) -> float:
        tried.append(batch_size)
        accelerator.free_memory()
        model, loader = accelerator.prepare(
            torch.nn.Linear(2, 1),
            DataLoader(TensorDataset(torch.ones(256, 2)), batch_size=batch_size),
        )
        for (x,) in loader:
            if RANK == LAST and len(x) > 16:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            accelerator.backward(model(x).mean())
        return float(gather(torch.tensor(1.0)).sum())

    first, again = train(), train()
    return {"tried": tried, "ranks": first, "again": again}


def batch_size_without_waiting() -> list[int]:
    """Nobody waits for the rank that runs out of memory: the group stays."""
    Accelerator()
    group, tried = torch.distributed.group.WORLD, []

    @find_executable_batch_size(starting_batch_size=10)
    def attempt(batch_size: int) -> None:
        tried.append(batch_size)
        if RANK == 0 and batch_size > 3:
            raise torch.OutOfMemoryError

    attempt()
    assert torch.distributed.group.WORLD is group
    return tried
