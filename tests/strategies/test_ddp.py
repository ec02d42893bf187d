"""What Headway relies on of DistributedDataParallel, and when a backward pass is said to wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway.errors import UsageError
from headway.ipc.step_clock import BACKWARD, EXCHANGE, FORWARD, GRADIENTS, SCRIPT, SYNC, StepClock
from headway.strategies.ddp import _fix_buckets, _watch_frozen, time_buffers, time_exchange

pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def has_fixed_buckets(model: DistributedDataParallel) -> bool:
    """Return whether the first step had the buckets of all others; DDP says so in the second."""
    logged: Any = model._get_ddp_logging_data
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    return bool(logged()["has_rebuilt_buckets"])


def test_buckets_are_fixed_before_the_first_step_and_gradients_are_as_they_were() -> None:
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert not has_fixed_buckets(DistributedDataParallel(layers))
    layers.zero_grad()
    model = DistributedDataParallel(layers)
    before = layers[0].weight.grad = torch.ones(4, 3)
    _fix_buckets(model)
    assert layers[0].weight.grad is before
    assert torch.equal(before, torch.ones(4, 3))
    assert layers[1].weight.grad is None
    assert has_fixed_buckets(model)


def test_hooks_on_gradients_see_none_of_zeros() -> None:
    layer = nn.Linear(3, 4)
    seen: list[torch.Tensor] = []
    weight: Any = layer.weight
    weight.register_post_accumulate_grad_hook(seen.append)
    _fix_buckets(DistributedDataParallel(layer))
    assert not seen


def test_a_parameter_that_is_unfrozen_later_is_refused_where_it_would_be_trained() -> None:
    layers = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 2))
    model = DistributedDataParallel(layers)
    _watch_frozen(model)
    model(torch.ones(1, 3)).sum().backward()
    layers[0].requires_grad_(True)
    with torch.no_grad():
        model(torch.ones(1, 3))
    with pytest.raises(UsageError) as refused:
        model(torch.ones(1, 3))
    assert "0.weight" in refused.value.problems[0].what


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
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    threading.Timer(2 * SLOW_S, done.set_result, [bucket.buffer()]).start()
    return done


slow_exchange.__annotations__ = {  # torch compares them with types, not with their names
    "bucket": dist.GradBucket,
    "return": torch.futures.Future[torch.Tensor],
}


def passes(model: torch.nn.Module, clock: StepClock, count: int) -> list[tuple[float, float]]:
    """Return what each of some backward passes takes, without and with waiting."""
    taken = []
    for number in range(count):
        clock.enter(FORWARD)
        loss = model(torch.ones(2, 4)).sum()
        clock.enter(BACKWARD)
        before = clock.spent[GRADIENTS], clock.spent[EXCHANGE]
        time_exchange(loss, clock)
        loss.backward()
        clock.enter(SCRIPT)
        taken.append((clock.spent[GRADIENTS] - before[0], clock.spent[EXCHANGE] - before[1]))
        clock.end_step(number)
    return taken


@pytest.mark.parametrize("finds_unused", [False, True])
def test_what_comes_after_the_last_gradient_is_waiting(group: None, finds_unused: bool) -> None:
    model = DistributedDataParallel(Model(), find_unused_parameters=finds_unused)
    model.register_comm_hook(None, slow_exchange)
    taken = passes(model, StepClock(), 3)
    assert all(SLOW_S <= backward_s < 2 * SLOW_S <= sync_s for backward_s, sync_s in taken)


def test_waiting_for_the_buffers_of_rank_0_is_no_forward_pass(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = DistributedDataParallel(Model())
    clock = StepClock()
    time_buffers(model, clock)
    monkeypatch.setattr(model, "_sync_buffers", lambda: time.sleep(SLOW_S))
    clock.enter(FORWARD)
    before = clock.spent[FORWARD], clock.tally.spent[SYNC]
    model(torch.ones(2, 4))
    clock.enter(FORWARD)
    assert clock.spent[SYNC] - before[1] >= SLOW_S > clock.tally.spent[FORWARD] - before[0]
