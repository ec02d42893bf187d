"""When a backward pass of DDP is said to wait, by a model whose exchange the test slows down."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from headway.contract.progress import Progress
from headway.contract.step_clock import BACKWARD, EXCHANGE, FORWARD, SYNC, StepClock
from headway.strategies.ddp import note_buffers, note_exchange

SLOW_S = 0.2  # others use this machine


class SlowToCompute(torch.autograd.Function):
    """The identity, whose backward pass takes its time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(SLOW_S)
        return gradient


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(SlowToCompute.apply(self.first(x)))  # type: ignore[no-untyped-call]
        return output


def slow_exchange(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Stand for ranks that come later by twice the time that a backward pass takes."""
    time.sleep(2 * SLOW_S)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


slow_exchange.__annotations__ = {  # torch compares them with types, not with their names
    "bucket": dist.GradBucket,
    "return": torch.futures.Future[torch.Tensor],
}


def passes(model: torch.nn.Module, progress: Progress, count: int) -> list[tuple[float, float]]:
    """Return what each of some backward passes takes, without and with waiting."""
    clock = progress.clock
    taken = []
    for _ in range(count):
        clock.enter(FORWARD)
        loss = model(torch.ones(2, 4)).sum()
        clock.enter(BACKWARD)
        before = clock.spent[BACKWARD], clock.tally.spent[EXCHANGE]
        loss.backward()
        progress.end_backward()
        taken.append((clock.spent[BACKWARD] - before[0], clock.tally.spent[EXCHANGE] - before[1]))
    return taken


def test_what_comes_after_the_last_gradient_is_waiting(group: None) -> None:
    model = DistributedDataParallel(Model())
    model.register_comm_hook(None, slow_exchange)
    progress = Progress()
    note_exchange(model, progress)
    taken = passes(model, progress, 9)
    for backward_s, sync_s in taken:
        assert backward_s >= SLOW_S
        assert sync_s >= 2 * SLOW_S
    for some in (taken[:3], taken[3:]):  # until the last parameter is known, and from then on
        assert min(backward_s for backward_s, _ in some) < 2 * SLOW_S
    assert sum(len(one._post_accumulate_grad_hooks or ()) for one in model.parameters()) == 1


def test_waiting_for_the_buffers_of_rank_0_is_no_forward_pass(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = DistributedDataParallel(Model())
    clock = StepClock()
    note_buffers(model, clock)
    monkeypatch.setattr(model, "_sync_buffers", lambda: time.sleep(SLOW_S))
    clock.enter(FORWARD)
    before = clock.spent[FORWARD], clock.tally.spent[SYNC]
    model(torch.ones(2, 4))
    clock.enter(FORWARD)
    assert clock.spent[SYNC] - before[1] >= SLOW_S > clock.tally.spent[FORWARD] - before[0]
