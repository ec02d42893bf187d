"""What Headway relies on of DistributedDataParallel, and when a backward pass is said to wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway.errors import UsageError
from headway.ipc.step_clock import BACKWARD, EXCHANGE, FORWARD, SYNC, StepClock
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


class Identity(torch.autograd.Function):
    """The identity, whose backward pass is noted."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, events: list[str]) -> torch.Tensor:
        ctx.events = events
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.events.append("computed")
        return gradient, None


class Model(torch.nn.Module):
    def __init__(self, clock: StepClock, events: list[str]) -> None:
        super().__init__()
        self.clock, self.events = clock, events
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.events.append(f"forward in phase {self.clock.phase}")
        hidden = Identity.apply(self.first(x), self.events)  # type: ignore[no-untyped-call]
        output: torch.Tensor = self.last(hidden)
        return output


@pytest.mark.parametrize("finds_unused", [False, True])
def test_what_comes_after_the_last_gradient_is_waiting(group: None, finds_unused: bool) -> None:
    events: list[str] = []
    is_waiting = threading.Event()

    class Clock(StepClock):
        def begin_exchange(self) -> None:
            super().begin_exchange()
            events.append("waiting")
            is_waiting.set()

    def exchange(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Stand for other ranks, which finish once this rank waits for them."""
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def finish() -> None:
            is_waiting.wait(60)
            events.append("exchanged")
            done.set_result(bucket.buffer())

        events.append("sent")
        threading.Thread(target=finish).start()
        return done

    exchange.__annotations__ = {  # torch compares them with types, not with their names
        "bucket": dist.GradBucket,
        "return": torch.futures.Future[torch.Tensor],
    }
    clock = Clock()
    model = DistributedDataParallel(Model(clock, []), find_unused_parameters=finds_unused)
    model.module.events = events
    model.register_comm_hook(None, exchange)
    for number in range(3):
        loss = model(torch.ones(2, 4)).sum()
        clock.enter(BACKWARD)
        handle = time_exchange(loss, clock)
        loss.backward()
        assert clock.phase == EXCHANGE
        assert events == ["forward in phase 0", "computed", "sent", "waiting", "exchanged"]
        clock.end_step(number)
        handle.remove()
        events.clear()
        is_waiting.clear()


def test_waiting_for_the_buffers_of_rank_0_is_no_forward_pass(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    clock = StepClock()
    model = DistributedDataParallel(Model(clock, events))
    time_buffers(model, clock)
    monkeypatch.setattr(model, "_sync_buffers", lambda: events.append(f"phase {clock.phase}"))
    clock.enter(FORWARD)
    model(torch.ones(2, 4))
    assert events == [f"phase {SYNC}", f"forward in phase {FORWARD}"]
