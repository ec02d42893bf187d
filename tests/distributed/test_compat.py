"""On two ranks headway.compat gives the numbers of Accelerate, where headway gives others."""

from __future__ import annotations

import json

import pytest

from tests.distributed.launching import launch, script

pytest.importorskip("accelerate")
pytestmark = pytest.mark.distributed

TRAINING = """
import json, sys, warnings
from importlib import import_module
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
inverse = lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step))
CASES = (
    ("lambda", inverse, {}),
    ("one cycle", lambda optimizer: OneCycleLR(optimizer, 1.0, total_steps=7), {}),
    ("split", inverse, {"split_batches": True}),
    ("alone", inverse, {"step_scheduler_with_optimizer": False}),
)

def numbers(Accelerator, schedule, arguments):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **arguments)
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, 1.0)
    torch.nn.init.constant_(model.bias, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(16.0).unsqueeze(1)), batch_size=2)
    scheduler = schedule(optimizer)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    found = []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found += [norm.item(), *scheduler.get_last_lr()]
    found += [weight.item() for weight in model.parameters()]
    accelerator.free_memory()
    return found

seen = {}
for module in sys.argv[1:]:
    for name, schedule, arguments in CASES:
        if module == "accelerate" and "split_batches" in arguments:
            from accelerate import DataLoaderConfiguration
            arguments = {"dataloader_config": DataLoaderConfiguration(split_batches=True)}
        found = numbers(import_module(module).Accelerator, schedule, arguments)
        seen.setdefault(module, {})[name] = found
print("seen", json.dumps(seen), flush=True)
"""


def test_schedules_and_clipping_are_those_of_accelerate_in_compat_only() -> None:
    modules = ("accelerate", "headway.compat", "headway")
    done = launch("-q", "--cpu", "--num-processes", "2", script(TRAINING), *modules)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "seen " in line]
    assert len(lines) == 2
    for line in lines:
        original, compat, native = json.loads(line.partition("seen ")[2]).values()
        for name, expected in original.items():
            assert compat[name] == pytest.approx(expected, abs=1e-6), name
            assert native[name] != pytest.approx(expected, abs=1e-6), name
