"""Objects that are prepared one at a time."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.compat import Accelerator as CompatAccelerator
from headway.compat.optimizer import AcceleratedOptimizer  # type: ignore[import-not-found]
from headway.errors import UsageError


def test_objects_prepared_one_at_a_time_are_those_of_prepare() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.zeros(2, 1)))
    prepared = (
        accelerator.prepare_model(model),
        accelerator.prepare_optimizer(optimizer, device_placement=False),
        accelerator.prepare_scheduler(scheduler),
        accelerator.prepare_data_loader(loader, device_placement=True),
    )
    assert accelerator.prepare(model, optimizer, scheduler, loader) == prepared
    assert accelerator.prepare_optimizer(prepared[1]) is prepared[1]


def test_weights_are_left_where_they_are_without_device_placement() -> None:
    model = torch.nn.Linear(1, 1, device="meta")
    prepared = Accelerator(cpu=True).prepare_model(model, device_placement=False)
    assert prepared.weight.device.type == "meta"


def test_a_model_spread_by_a_device_map_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model: Any = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model[0].hf_device_map = {"": 0}
    accelerator.prepare(copy.deepcopy(model))
    model[0].hf_device_map = {"a": 0, "b": 1}
    with pytest.raises(UsageError, match="device_map"):
        accelerator.prepare(model)


def test_an_optimizer_that_a_script_makes_itself_follows_the_gradient_state() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = AcceleratedOptimizer(torch.optim.SGD([weight], lr=1.0), device_placement=False)
    optimizer.train()
    for _ in range(2):
        with accelerator.accumulate():
            accelerator.backward(weight.sum())
            optimizer.step()
            optimizer.zero_grad()
    assert weight.item() == 0.0
    assert optimizer.accelerator_state.device == accelerator.device
    assert optimizer.gradient_state.num_steps == 2
    with pytest.raises(UsageError):
        AcceleratedOptimizer(torch.optim.SGD([weight]), scaler=torch.amp.GradScaler("cpu"))


class Lookahead(SimpleNamespace):
    """Wraps an optimizer as many libraries do, without being one."""


def test_what_only_looks_like_an_optimizer_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    accelerator, weight = Accelerator(cpu=True), torch.nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD([weight], lr=1.0)
    wrapper = Lookahead(step=inner.step, zero_grad=inner.zero_grad, param_groups=[])
    for _ in range(2):
        assert accelerator.prepare(wrapper) is wrapper
    accelerator.prepare(inner, iter([1]), [1], 5)
    assert capsys.readouterr().err.count("note: prepare() returned a Lookahead unchanged") == 1


def test_compat_counts_micro_batches_until_a_loader_ends() -> None:
    accelerator = CompatAccelerator(cpu=True, gradient_accumulation_steps=2)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.ones(5, 1))))
    steps = []
    for _ in loader:
        with accelerator.accumulate():
            steps.append(accelerator.step)
    assert steps == [1, 2, 3, 4, 0]
    accelerator.set_trigger()
    assert accelerator.flag_tensor.item() == 1
    assert accelerator.check_trigger()
    assert accelerator.flag_tensor.item() == 0
    assert [accelerator.state.debug, accelerator.state.fork_launched] == [False, False]
