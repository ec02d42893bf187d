"""Intel's GPUs in a rank, with a stand-in for `torch.xpu`: no such device is at hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.contract.run import Ranks
from headway.distributed import world
from headway.distributed.rng import generator_states, set_generator_states
from headway.errors import MachineError
from headway.memory import clear_device_cache
from headway.precision.precision import precision_for
from tests.machines.recorded import load

SECOND = Ranks(rank=1, local_rank=1, world_size=2, local_world_size=2)


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand in for two GPUs; return what they were told."""
    told: list[Any] = []
    calls = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "set_device": told.append,
        "empty_cache": lambda: told.append("emptied"),
        "get_rng_state": lambda device: torch.tensor([device.index], dtype=torch.uint8),
        "set_rng_state": lambda state, device: told.append((state.tolist(), device.index)),
        "max_memory_allocated": lambda gpu: 3 + gpu,
        "max_memory_reserved": lambda gpu: 4 + gpu,
        "get_device_properties": lambda _: SimpleNamespace(name="Arc A770", has_fp64=False),
    }
    for name, call in calls.items():
        monkeypatch.setattr(torch.xpu, name, call)
    monkeypatch.setattr(world, "detect_machine", lambda: load("intel_4"))
    return told


@pytest.mark.usefixtures("xpu")
@pytest.mark.parametrize("asked", ["auto", "gpu", "xpu"])
def test_each_rank_has_a_gpu_of_its_own(asked: str) -> None:
    assert world._device_of(SECOND, asked, None) == torch.device("xpu", 1)
    assert world._device_of(Ranks(), asked, 1) == torch.device("xpu", 1)
    with pytest.raises(MachineError):
        world._device_of(SECOND._replace(local_rank=2), asked, None)


def test_without_one_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "detect_machine", lambda: load("intel_laptop"))
    with pytest.raises(MachineError) as caught:
        world._device_of(Ranks(), "xpu", None)
    assert str(load("intel_laptop").why_not("xpu")) in str(caught.value)


def test_ranks_exchange_tensors_by_xccl(xpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    formed: list[str] = []
    dist = torch.distributed
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: formed.append(backend))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "is_initialized", lambda: bool(formed))
    monkeypatch.setattr(dist, "get_backend_config", lambda: formed[0])
    monkeypatch.setattr(world, "read_ranks", lambda: SECOND)
    joined = world.join_world("xpu")
    assert formed == ["cpu:gloo,xpu:xccl"]
    assert xpu == [torch.device("xpu", 1)]
    assert joined.distributed_type == "MULTI_XPU"
    assert world.group_backend(joined.device) == "xccl"
    assert world.group_device() == joined.device


def test_its_generator_and_its_cache_are_known(xpu: list[Any]) -> None:
    states = generator_states(torch.device("xpu", 1))
    set_generator_states(states, torch.device("xpu", 0))
    set_generator_states(states, torch.device("cpu"))
    assert xpu == [([1], 0)]
    clear_device_cache()
    assert xpu[1:] == ["emptied"]


def test_fp16_needs_a_gpu_that_computes_in_fp64(
    xpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("xpu", 0)
    assert precision_for("bf16", device, where="here").name == "bf16"
    with pytest.raises(MachineError, match="Arc A770"):
        precision_for("fp16", device, where="here")
    capable = SimpleNamespace(name="Arc B580", has_fp64=True)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: capable)
    assert precision_for("fp16", device, where="here").scaler is not None
