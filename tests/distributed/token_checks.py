"""Gradients of the mean over all tokens of a step; see runtime_worker.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from headway import Accelerator
from tests.distributed.this_rank import RANK, WORLD

COUNTS = [7, 0, 1, 30, 2, 0, 5, 11, 3, 0, 0, 0, 4, 19, 1, 6, 0, 23]
"""The tokens of 18 micro-batches, of which any number of ranks and steps has its share."""


def gradients_of_the_token_mean() -> dict[str, Any]:
    """Gradients and weights of two optimizer steps, on all tokens in a different division."""
    result = {}
    for accumulation in (1, 3):
        for way in ("accumulate", "no_sync", "clip"):
            result[f"{accumulation} {way}"] = _train(accumulation, way)
    return result


def _train(accumulation: int, way: str) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 5, dtype=torch.float64)
    inputs = torch.randn(sum(COUNTS), 3, dtype=torch.float64)
    targets = torch.randint(5, (sum(COUNTS),))
    accelerator = Accelerator(gradient_accumulation_steps=1 if way == "no_sync" else accumulation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    ends = torch.tensor(COUNTS).cumsum(0).tolist()
    batches = [slice(end - count, end) for end, count in zip(ends, COUNTS, strict=True)]
    for half in (batches[:9], batches[9:]):
        for step in range(accumulation):
            mine = half[RANK * accumulation + step :: WORLD * accumulation]
            rows = [row for one in mine for row in range(one.start, one.stop)]
            is_last = step == accumulation - 1
            context = accelerator.accumulate(model)
            if way == "no_sync":
                context = nullcontext() if is_last else accelerator.no_sync(model)
            with context:
                loss = torch.nn.functional.cross_entropy(
                    model(inputs[rows]), targets[rows], reduction="sum"
                )
                accelerator.backward(loss, num_tokens=len(rows))
                if way == "clip":
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                if is_last or way != "no_sync":
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
    return torch.cat([one.detach().flatten() for one in model.parameters()]).tolist()
