"""Which modules of a model are sharded together."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from headway.errors import UsageError
from headway.strategies.units import units_of


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
    return [by_module[one] for one in units_of(model, wrap)]


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
    assert sorted(names(model, "Block,Embedding")) == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "token",
    ]
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
    assert "'Block'" in refused.value.problems[0].fix
