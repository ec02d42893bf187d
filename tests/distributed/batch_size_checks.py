"""Batch sizes that all ranks settle on; see runtime_worker.py."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.utils import find_executable_batch_size, gather
from tests.distributed.this_rank import RANK, WORLD


def batch_size_of_the_rank_with_least_memory() -> dict[str, Any]:
    """The last rank runs out of memory; the others train their attempt to its end."""
    accelerator = Accelerator()
    tried = []

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size: int) -> float:
        tried.append(batch_size)
        accelerator.free_memory()
        data = TensorDataset(torch.ones(256, 2))
        model = accelerator.prepare(torch.nn.Linear(2, 1))
        loader = accelerator.prepare(DataLoader(data, batch_size=batch_size))
        for (x,) in loader:
            accelerator.backward(model(x).mean())
        if RANK == WORLD - 1 and batch_size > 16:
            raise torch.OutOfMemoryError
        return float(torch.ones(1).sum())

    train()
    train()
    return {"tried": tried, "ranks": float(gather(torch.tensor(1.0)).sum())}
