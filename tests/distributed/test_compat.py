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
        if module != "headway" and "split_batches" in arguments:
            config = import_module(f"{module}.utils").DataLoaderConfiguration(split_batches=True)
            arguments = {"dataloader_config": config}
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


LOADING = """
import json, os, sys, warnings
from importlib import import_module
import torch
from torch.utils.data import DataLoader, IterableDataset

warnings.simplefilter("ignore")
rank = int(os.environ["RANK"])

class Stream(IterableDataset):
    epoch = 0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        return iter(range(10 * self.epoch, 10 * self.epoch + 11))

KINDS = {
    "generator": lambda: DataLoader(range(11), 2, True, generator=torch.Generator().manual_seed(5)),
    "dropped": lambda: DataLoader(range(11), 2, drop_last=True),
    "stream": lambda: DataLoader(Stream(), 2),
}
CHOICES = (
    {"use_seedable_sampler": True},
    {"dispatch_batches": True},
    {"dispatch_batches": True, "split_batches": True},
    {"dispatch_batches": False},
)

def passes(module, make, choice):
    # two passes, one without its first batch, one more; and what is drawn between them
    configuration = import_module(module + ".utils").DataLoaderConfiguration
    accelerator = import_module(module).Accelerator(
        cpu=True, dataloader_config=configuration(**choice)
    )
    torch.manual_seed(3)
    loader, seen = accelerator.prepare(make()), []
    for turn in range(4):
        source = accelerator.skip_first_batches(loader, 1) if turn == 2 else loader
        for batch in source:
            state = accelerator.gradient_state
            seen.append([batch.tolist(), state.end_of_dataloader])
            seen += [state.remainder] if source is loader else []
            seen.append(torch.rand(1).item())
    return seen

def batches(accelerator, **arguments):
    return [one.tolist() for one in accelerator.prepare(DataLoader(range(9), 2, **arguments))]

def joined(accelerator):
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, 1.0)
    torch.nn.init.constant_(model.bias, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(torch.arange(10.0).unsqueeze(1), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    counts = [len(loader)]
    with accelerator.join_uneven_inputs([model], even_batches=False):
        counts.append(0)
        for batch in loader:
            counts[-1] += 1
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    weight = accelerator.unwrap_model(model).weight.item()
    return {"counts": [*counts, len(loader)], "weight": weight}

seen = {}
for module in sys.argv[1:]:
    Accelerator = import_module(module).Accelerator
    accelerator = Accelerator(cpu=True, rng_types=["torch", "generator"])
    torch.manual_seed(7 * rank)
    loader = accelerator.prepare(DataLoader(range(4), 1, shuffle=True))
    order = [one.item() for one in loader]
    drawn = torch.rand(1).item()
    seen[module] = {
        "order": order,
        "drawn": drawn,
        "uneven": batches(accelerator),
        "dropped": batches(accelerator, drop_last=True),
        "none": accelerator.reduce(torch.tensor(rank + 1.0), "none").item(),
        "joined": joined(accelerator),
        "passes": {
            f"{kind} {choice}": passes(module, make, choice)
            for kind, make in KINDS.items()
            for choice in CHOICES
        } if module != "headway" else {},
    }
    accelerator.free_memory()
print("seen", json.dumps(seen), flush=True)
"""


def test_loaders_are_those_of_accelerate_in_compat_and_joins_and_generators_in_both() -> None:
    modules = ("accelerate", "headway.compat", "headway")
    done = launch("-q", "--cpu", "--num-processes", "2", script(LOADING), *modules)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "seen " in line]
    ranks = [json.loads(line.partition("seen ")[2]) for line in lines]
    assert len(ranks) == 2
    for original, compat, native in (one.values() for one in ranks):
        del original["joined"]  # Accelerate ignores it on the CPU
        assert native["joined"] == compat.pop("joined")
        assert native["joined"]["weight"] == pytest.approx(_weight_after_joining(), abs=1e-6)
        orders = compat.pop("passes"), original.pop("passes")
        assert [name for name in orders[1] if orders[0][name] != orders[1][name]] == []
        assert compat == original
        assert native["none"] != original["none"]
    assert any(one["headway"]["uneven"] != one["accelerate"]["uneven"] for one in ranks)
    counts = [one["headway"]["joined"]["counts"] for one in ranks]
    assert sorted(counts) == [[3, 2, 3], [3, 3, 3]]
    for module in modules:
        first, second = (one[module] for one in ranks)
        assert first["drawn"] == second["drawn"]
        assert sorted(first["order"] + second["order"]) == [0, 1, 2, 3]


def _weight_after_joining() -> float:
    """Return what torch's Join makes of LOADING's model: a rank without a batch adds zeros."""
    weight, bias = 1.0, 0.0
    for batch in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9]):
        errors = [weight * one + bias for one in batch]
        weight -= 0.01 * sum(2 * one * x for one, x in zip(errors, batch, strict=True)) / 4
        bias -= 0.01 * sum(2 * one for one in errors) / 4
    return weight
