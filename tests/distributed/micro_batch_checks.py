"""Batches in parts that fit into the memory of all ranks; see runtime_worker.py."""

from __future__ import annotations

from typing import Any

import torch

from headway import Accelerator
from tests.distributed.this_rank import RANK, WORLD


class _Limited(torch.nn.Linear):
    """Has no memory for more than so many samples."""

    limit = 1000

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory, {len(x)} samples")
        result: torch.Tensor = super().forward(x)
        return result


def weights_with_parts_of_batches() -> dict[str, Any]:
    """Weights after four batches of 24 samples in all, and the sizes of parts that were tried."""
    result: dict[str, Any] = {}
    for steps in (1, 2):
        for by_tokens in (False, True):
            result[f"{steps} whole {by_tokens}"] = _train(steps, 1000, by_tokens)[0]
            result[f"{steps} parts {by_tokens}"], result["sizes"] = _train(steps, 3, by_tokens)
    return result


def _train(steps: int, limit: int, by_tokens: bool) -> tuple[list[float], list[int]]:
    torch.manual_seed(1)
    accelerator = Accelerator(gradient_accumulation_steps=steps, auto_micro_batch=True)
    plain = _Limited(3, 1, dtype=torch.float64)
    plain.limit = limit if RANK == WORLD - 1 else 1000
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    sizes = []
    for global_batch in torch.randn(4, 24, 3, dtype=torch.float64):
        x = global_batch.chunk(WORLD)[RANK]
        for part in accelerator.micro_batches({"x": x, "name": "batch"}, max_size=20):
            sizes.append(len(part["x"]))
            with accelerator.accumulate(model):
                losses = model(part["x"]).square().flatten()
                if by_tokens:
                    accelerator.backward(losses.sum(), num_tokens=len(losses))
                else:
                    accelerator.backward(losses.mean())
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
                optimizer.step()
                optimizer.zero_grad()
    assert not accelerator.optimizer_step_was_skipped
    return torch.cat([one.detach().flatten() for one in model.parameters()]).tolist(), sizes
