"""GPUs of Apple and Intel: with stand-ins for torch's modules everywhere, on a Mac for real."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway.accelerator import Accelerator
from headway.data.loader import PreparedDataLoader
from headway.distributed import world
from headway.distributed.rng import generator_states, set_generator_states
from headway.errors import MachineError
from headway.ipc.run_contract import Ranks
from headway.machine.facts import load_machine
from headway.memory import clear_device_cache
from headway.precision.precision import precision_for
from tests.distributed.launching import execute, launch
from tests.machines.recorded import FOLDER, load

ALONE = Ranks()
TWO = Ranks(rank=0, local_rank=0, world_size=2, local_world_size=2)


def pretend(monkeypatch: pytest.MonkeyPatch, machine: str, is_available: bool) -> None:
    there = load_machine(str(FOLDER / f"{machine}.json"))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: is_available)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(world, "detect_machine", lambda: there)


@pytest.mark.parametrize(
    ("machine", "ranks", "asked", "device"),
    [
        *(("mac_m2", ALONE, asked, "mps") for asked in ("auto", "gpu", "mps")),
        ("mac_m2", TWO, "auto", "cpu"),  # a GPU for one rank alone
        ("mac_virtual", ALONE, "auto", "cpu"),
    ],
)
def test_a_mac_computes_on_its_gpu_unless_ranks_or_the_user_rule_it_out(
    machine: str, ranks: Ranks, asked: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, machine, True)
    assert world._device_of(ranks, asked) == torch.device(device)


@pytest.mark.parametrize(
    ("machine", "asked", "reason"),
    [
        ("mac_rosetta", "mps", "Rosetta"),
        ("mac_13", "mps", "macOS 13.7.4 is older than 14.0"),
        ("laptop_cpu", "mps", "not a Mac"),
        ("laptop_cpu", "gpu", "device is 'gpu', but there is no GPU"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_the_reason(
    machine: str, asked: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, machine, False)
    with pytest.raises(MachineError) as caught:
        world._device_of(ALONE, asked)
    assert reason in str(caught.value)


def test_pinned_memory_is_off_for_mps_and_stays_for_others() -> None:
    for device, is_pinned in (("mps", False), ("cuda", True), ("cpu", True)):
        loader = DataLoader(TensorDataset(torch.ones(4)), pin_memory=True)
        PreparedDataLoader(loader, device=torch.device(device))
        assert loader.pin_memory is is_pinned


# ------------------------------------------------------------------ on a Mac

on_a_mac = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an Apple GPU")


@pytest.mark.mps
@on_a_mac
@pytest.mark.parametrize("mixed_precision", ["no", "fp16", "bf16"])
def test_a_model_learns_on_the_apple_gpu(mixed_precision: str) -> None:
    accelerator = Accelerator(mixed_precision=mixed_precision)
    assert accelerator.device.type == "mps"
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    targets = inputs.sum(dim=1, keepdim=True)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, pin_memory=True)
    model = torch.nn.Linear(8, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _epoch in range(10):
            for batch, target in loader:
                assert batch.device.type == "mps"
                loss = torch.nn.functional.mse_loss(model(batch), target)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    assert float(loss) < 0.1


@pytest.mark.mps
@on_a_mac
@pytest.mark.parametrize("words", [[], ["--env", "PYTORCH_ENABLE_MPS_FALLBACK=0"]])
def test_the_smoke_test_passes_on_the_apple_gpu(words: list[str]) -> None:
    done = execute([sys.executable, "-m", "headway", "test", *words], code=0)
    assert "1 rank on mps" in done.stdout


@pytest.mark.mps
@on_a_mac
def test_strict_makes_a_missing_kernel_an_error(tmp_path: Path) -> None:
    (tmp_path / "missing.py").write_text(
        "import torch\ntorch.linalg.eig(torch.eye(3, device='mps'))\n"
    )
    strict = ("--env", "PYTORCH_ENABLE_MPS_FALLBACK=0")
    for words, is_refused in ((strict, True), ((), False)):
        done = launch("-q", *words, str(tmp_path / "missing.py"))
        assert bool(done.returncode) == is_refused


@pytest.mark.mps
@on_a_mac
def test_what_is_detected_agrees_with_torch() -> None:
    from headway.machine.detection import detect_machine

    machine = detect_machine(full=True)
    assert machine.mps
    assert machine.best_device()[0] == "mps"


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
def test_each_rank_has_a_gpu_of_its_own(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert world._device_of(SECOND, asked) == torch.device("xpu", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(MachineError, match=r"or train with `--cpu`$"):
        world._device_of(SECOND._replace(local_rank=2), asked)
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(MachineError, match="LOCAL_RANK is not set"):
        world._device_of(SECOND._replace(local_rank=2), asked)


def test_without_one_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "detect_machine", lambda: load("intel_laptop"))
    with pytest.raises(MachineError) as caught:
        world._device_of(Ranks(), "xpu")
    assert str(load("intel_laptop").unavailable_reason("xpu")) in str(caught.value)


def test_ranks_exchange_tensors_by_xccl(xpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    formed: list[str] = []
    dist = torch.distributed
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: formed.append(backend))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "is_initialized", lambda: bool(formed))
    monkeypatch.setattr(dist, "get_backend_config", lambda: formed[0])
    monkeypatch.setattr(world, "read_ranks", lambda: SECOND)
    joined = world.join_world("xpu", world.InitProcessGroupKwargs())
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
