"""Apple silicon: with a faked `torch.backends.mps` everywhere, and for real where a Mac is."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway.accelerator import Accelerator
from headway.contract.run import Ranks
from headway.data.loader import PreparedDataLoader
from headway.distributed import world
from headway.errors import MachineError
from headway.machine.snapshot import load_machine
from tests.distributed.launching import execute, launch
from tests.machines.recorded import FOLDER

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
    assert world._device_of(ranks, asked, None) == torch.device(device)


@pytest.mark.parametrize(
    ("machine", "asked", "reason"),
    [
        ("mac_rosetta", "mps", "Rosetta"),
        ("mac_13", "mps", "macOS 13.7.4 is older than 14.0"),
        ("laptop_cpu", "mps", "not a Mac"),
        ("laptop_cpu", "gpu", "device is 'gpu', but this machine has none"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_the_reason(
    machine: str, asked: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, machine, False)
    with pytest.raises(MachineError) as caught:
        world._device_of(ALONE, asked, None)
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
