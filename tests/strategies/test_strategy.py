"""What the Accelerator leaves to its strategy, seen with one that shards nothing but could."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.contract.run import Ranks
from headway.distributed.world import World
from headway.precision.precision import Precision
from headway.strategies.strategy import Strategy, StrategySettings
from headway.training import connector


class Replacing(Strategy):
    """Gives models new parameters, as sharding does, and is the second of three data ranks."""

    data_rank, data_size = 1, 3

    def __init__(self, world: World) -> None:
        self.set_up(world, StrategySettings())
        self.replaced: dict[torch.Tensor, torch.Tensor] = {}
        self.devices: list[torch.device | None] = []
        self.is_whole = False
        self.norms = 0

    def prepare_model(
        self,
        model: torch.nn.Module,
        precision: Precision,
        device: torch.device | None,
        *,
        trains: bool = True,
    ) -> torch.nn.Module:
        self.devices.append(device)
        for module in model.modules():
            for name, old in list(module.named_parameters(recurse=False)):
                self.replaced[old] = torch.nn.Parameter(old.detach().clone())
                setattr(module, name, self.replaced[old])
        return precision.prepare_model(model)

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["params"] = [self.replaced.get(one, one) for one in group["params"]]

    @contextmanager
    def whole(self, model: torch.nn.Module) -> Iterator[None]:
        self.is_whole = True
        yield

    def clip_grad_norm_(self, *args: Any) -> torch.Tensor:
        self.norms += 1
        return super().clip_grad_norm_(*args)

    def total_norm(self, *args: Any) -> torch.Tensor:
        self.norms += 1
        return super().total_norm(*args)


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch) -> Replacing:
    made = Replacing(World(torch.device("cpu"), Ranks()))
    monkeypatch.setattr(connector, "strategy_for", lambda *_: made)
    return made


@pytest.mark.parametrize("order", ["model first", "optimizer first", "optimizer long before"])
def test_an_optimizer_follows_the_parameters_that_a_strategy_puts_in_place(
    strategy: Replacing, order: str
) -> None:
    accelerator = Accelerator(cpu=True)
    model: Any = torch.nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    if order == "model first":
        model, optimizer = accelerator.prepare(model, optimizer)
    elif order == "optimizer first":
        optimizer, model = accelerator.prepare(optimizer, model)
    else:
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    before = model.bias.detach().clone()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert (before - model.bias).tolist() == pytest.approx([1.0])


def test_loaders_are_shared_out_over_the_strategy_s_data_ranks(strategy: Replacing) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(12)), batch_size=2))
    assert [batch.tolist() for (batch,) in loader] == [[2, 3], [8, 9]]


def test_only_the_strategy_places_a_model(strategy: Replacing) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.prepare(torch.nn.Linear(1, 1), device_placement=[False])
    assert strategy.devices == [torch.device("cpu"), None]


def test_weights_are_read_whole_and_norms_are_the_strategy_s(strategy: Replacing) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    assert list(accelerator.get_state_dict(model)) == ["weight", "bias"]
    assert strategy.is_whole
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert strategy.norms == 2
