"""On two ranks headway.compat gives the numbers of Accelerate, where headway gives others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.distributed.in_ranks import RANK, run_in_ranks
from tests.waiting import IS_LONG

pytest.importorskip("accelerate")
pytestmark = pytest.mark.distributed
MODULES = ("accelerate", "headway.compat", "headway")


def configured(module: str, **choice: object) -> Any:
    """Return a package's Accelerator with these choices for its loaders."""
    configuration = import_module(f"{module}.utils").DataLoaderConfiguration(**choice)
    return import_module(module).Accelerator(cpu=True, dataloader_config=configuration)


def linear() -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, 1.0)
    torch.nn.init.constant_(model.bias, 0.0)
    return model


def inverse(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


SCHEDULES: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "lambda": (inverse, {}),
    "one cycle": (lambda optimizer: OneCycleLR(optimizer, 1.0, total_steps=7), {}),
    "split": (inverse, {"split_batches": True}),
    "alone": (inverse, {"step_scheduler_with_optimizer": False}),
}


def numbers(module: str, name: str) -> list[float]:
    """Return norms, learning rates and weights of a training."""
    schedule, arguments = SCHEDULES[name]
    if module != "headway" and "split_batches" in arguments:
        utils = import_module(f"{module}.utils")
        arguments = {"dataloader_config": utils.DataLoaderConfiguration(split_batches=True)}
    accelerator = import_module(module).Accelerator(
        cpu=True, gradient_accumulation_steps=2, **arguments
    )
    model: Any = linear()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(torch.arange(16.0).unsqueeze(1)), batch_size=2)
    scheduler: Any = schedule(optimizer)
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


def all_numbers() -> list[dict[str, list[float]]]:
    warnings.simplefilter("ignore")
    return [{name: numbers(module, name) for name in SCHEDULES} for module in MODULES]


def test_schedules_and_clipping_are_those_of_accelerate_in_compat_only(tmp_path: Path) -> None:
    for original, compat, native in run_in_ranks(2, tmp_path, all_numbers):
        for name, expected in original.items():
            assert compat[name] == pytest.approx(expected, abs=1e-6), name
            assert native[name] != pytest.approx(expected, abs=1e-6), name


class Stream(IterableDataset[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(10 * self.epoch, 10 * self.epoch + 11))


ELEVEN: Any = range(11)
KINDS: dict[str, Callable[[], DataLoader[int]]] = {
    "generator": lambda: DataLoader(ELEVEN, 2, True, generator=torch.Generator().manual_seed(5)),
    "dropped": lambda: DataLoader(ELEVEN, 2, drop_last=True),
    "stream": lambda: DataLoader(Stream(), 2, num_workers=1, persistent_workers=True),
}
CHOICES: tuple[dict[str, bool], ...] = (
    {"use_seedable_sampler": True},
    {"dispatch_batches": True},
    {"dispatch_batches": True, "split_batches": True},
    {"dispatch_batches": False},
)


def passes(module: str, kind: str, choice: dict[str, bool]) -> list[Any]:
    """Two passes, one without its first batch, one more; and what is drawn between them."""
    accelerator = configured(module, **choice)
    torch.manual_seed(3)
    loader, seen = accelerator.prepare(KINDS[kind]()), list[Any]()
    for turn in range(4):
        source = accelerator.skip_first_batches(loader, 1) if turn == 2 else loader
        for batch in source:
            state = accelerator.gradient_state
            seen.append([batch.tolist(), state.end_of_dataloader])
            seen += [state.remainder] if source is loader else []
            seen.append(torch.rand(1).item())
    return seen


def batches(accelerator: Any, **arguments: Any) -> list[Any]:
    data: Any = range(9)
    return [x.tolist() for x in accelerator.prepare(DataLoader(data, 2, **arguments))]


def joined(accelerator: Any) -> tuple[list[int], float]:
    """Return the length of a loader before, its batches and its length after; and the weight."""
    model: Any = linear()
    data: Any = torch.arange(10.0).unsqueeze(1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(data, batch_size=2)
    )
    before, count = len(loader), 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in loader:
            count += 1
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return [before, count, len(loader)], accelerator.unwrap_model(model).weight.item()


def loaded(module: str) -> dict[str, Any]:
    accelerator = import_module(module).Accelerator(cpu=True, rng_types=["torch", "generator"])
    torch.manual_seed(7 * RANK)
    four: Any = range(4)
    order = [x.item() for x in accelerator.prepare(DataLoader(four, 1, shuffle=True))]
    found = {
        "order": order,
        "drawn": torch.rand(1).item(),
        "uneven": batches(accelerator),
        "dropped": batches(accelerator, drop_last=True),
        "small": accelerator.reduce(torch.tensor(200, dtype=torch.uint8)).item(),
        "none": accelerator.reduce(torch.tensor(RANK + 1.0), "none").item(),
        "joined": joined(accelerator),
    }
    if module != "headway":
        cases = [*product(KINDS, CHOICES)][:: 1 if IS_LONG else 3]  # each of both once, or all
        found["passes"] = [passes(module, *case) for case in cases]
    accelerator.free_memory()
    return found


def all_loaded() -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")
    return [loaded(module) for module in MODULES]


def test_loaders_are_those_of_accelerate_in_compat_and_joins_and_generators_in_both(
    tmp_path: Path,
) -> None:
    ranks = run_in_ranks(2, tmp_path, all_loaded)
    for first, second in zip(*ranks, strict=True):
        assert first["drawn"] == second["drawn"]
        assert sorted(first["order"] + second["order"]) == [0, 1, 2, 3]
    assert any(native["uneven"] != original["uneven"] for original, _, native in ranks)
    assert sorted(native["joined"][0] for _, _, native in ranks) == [[3, 2, 3], [3, 3, 3]]
    for original, compat, native in ranks:
        del original["joined"]  # Accelerate ignores it on the CPU
        assert native["joined"] == compat.pop("joined")
        assert native["joined"][1] == pytest.approx(weight_after_joining(), abs=1e-6)
        assert compat == original
        assert native["none"] != original["none"]


def weight_after_joining() -> float:
    """Return what torch's Join makes of the model: a rank without a batch adds zeros."""
    weight, bias = 1.0, 0.0
    for batch in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9]):
        errors = [weight * x + bias for x in batch]
        weight -= 0.01 * sum(2 * error * x for error, x in zip(errors, batch, strict=True)) / 4
        bias -= 0.01 * sum(2 * error for error in errors) / 4
    return weight
