"""What the Accelerator leaves to its strategy, and which modules a strategy shards together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.distributed.world import World
from headway.errors import UsageError
from headway.ipc.run_contract import Ranks
from headway.precision.precision import Precision
from headway.strategies.strategy import Strategy, StrategySettings
from headway.strategies.units import units_of
from headway.training import accelerator_setup


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
            group["params"] = [self.replaced.get(p, p) for p in group["params"]]

    @contextmanager
    def unsharded(self, model: torch.nn.Module) -> Iterator[None]:
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
    monkeypatch.setattr(accelerator_setup, "strategy_for", lambda *_: made)
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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.perceptron = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(4, 9)


def names(model: nn.Module, wrap: str = "auto") -> list[str]:
    by_module = {module: name for name, module in model.named_modules()}
    return [by_module[unit] for unit in units_of(model, wrap)]


def test_units_are_the_outermost_blocks_that_a_list_repeats() -> None:
    assert sorted(names(Model())) == ["blocks.0", "blocks.1", "blocks.2"]
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Dropout())
    assert sorted(names(nn.Sequential(layers, nn.Linear(2, 1)))) == ["0.0", "0.2"]
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


def test_units_in_lists_of_lists_are_the_inner_blocks() -> None:
    stages = nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(2)))
    assert sorted(names(stages)) == ["0.0", "0.1", "1.0", "1.1"]
    layers = nn.Sequential(*(Block().perceptron for _ in range(2)))
    assert sorted(names(layers)) == ["0", "1"]


def test_named_classes_are_units_inner_ones_first() -> None:
    model = Model()
    assert sorted(names(model, "Block,Embedding")) == ["blocks.0", "blocks.1", "blocks.2", "token"]
    found = names(model, "Block,Linear")
    assert found.index("blocks.0.perceptron.0") < found.index("blocks.0")


def test_a_number_is_the_smallest_unit() -> None:
    model = Model()  # 36 in token, 76 in each block, 45 in head
    assert sorted(names(model, "70")) == [f"blocks.{n}.perceptron" for n in range(3)]
    assert "head" in names(model, "40")
    assert names(model, "100000") == []


def test_a_module_that_shares_a_parameter_with_one_outside_of_it_is_no_unit() -> None:
    model = Model()
    model.blocks[1].extra = model.token
    assert sorted(names(model)) == ["blocks.0", "blocks.2"]
    blocks: Any = model.blocks
    blocks[2].perceptron[0].weight = blocks[0].perceptron[0].weight
    assert names(model) == []


def test_an_inner_unit_that_shares_a_parameter_with_its_outer_one_belongs_to_that() -> None:
    model = Model()
    block: Any = model.blocks[0]
    block.weight = block.perceptron[0].weight
    found = names(model, "Block,Linear")
    assert "blocks.0" in found
    assert "blocks.0.perceptron.0" not in found
    assert "blocks.0.perceptron.2" in found


def test_a_class_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError) as refused:
        units_of(Model(), "Blok")
    assert "'Block'" in refused.value.problems[0].what
