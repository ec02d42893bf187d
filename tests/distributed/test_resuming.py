"""Ranks go on in the middle of an epoch, as many as before or more or fewer."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from headway import Accelerator
from headway.state import AcceleratorState
from headway.utils import DataLoaderConfiguration, set_seed
from tests.distributed.in_ranks import WORLD, run_in_ranks
from tests.waiting import IS_LONG

pytestmark = pytest.mark.distributed


class Trained(NamedTuple):
    """What a rank saw: of each step the loss, its samples and those of all ranks; its weights."""

    steps: list[tuple[str, list[float], list[float]]]
    weights: list[list[float]]


class Case(NamedTuple):
    """A configuration.

    Args:
        at: the step after which it is saved.
        size: samples in the data set.
    """

    at: int
    size: int = 41
    workers: int = 0
    dropout: float = 0.3
    options: Mapping[str, Any] = MappingProxyType({})


GLOBAL = {"seed": 7, "global_batch_size": 12}
SAME_RANKS = {  # tests/checkpoint/trainings.py combines more
    "between two optimizer steps": Case(8, options={"gradient_accumulation_steps": 3}),
    "workers and seed": Case(4, workers=2, options={"seed": 7}),
    "dispatch and seed": Case(
        3, workers=1, options={"seed": 7, "dataloader_config": {"dispatch_batches": True}}
    ),
    "split": Case(9, options={"dataloader_config": {"split_batches": True}}),
    "nothing repeated": Case(2, size=45, options={"dataloader_config": {"even_batches": False}}),
}
ANY_RANKS = {
    f"{name}, {workers} workers": Case(2, size, workers, 0, options={**GLOBAL, **options})
    for workers in (0, 2)
    for name, size, options in (
        ("even", 48, {"gradient_accumulation_steps": 1}),
        ("uneven", 41, {"dataloader_config": {"dispatch_batches": workers == 2 or None}}),
    )
    if IS_LONG or (name == "uneven") == (workers == 2)
}


EPOCHS = 2


class Samples(Dataset[torch.Tensor]):
    def __init__(self, size: int, is_random: bool) -> None:
        self._size, self._is_random = size, is_random

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(2) + random.random() if self._is_random else torch.zeros(2)
        return torch.cat([torch.tensor([float(index), index % 3]), noise])


def train(case: Case, *, save: Path | None = None, load: Path | None = None) -> Trained:
    """Train to the end, from the beginning or from a checkpoint; return what this rank saw."""
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    options = dict(case.options)
    data = DataLoaderConfiguration(**options.pop("dataloader_config", {}))
    accelerator = Accelerator(cpu=True, dataloader_config=data, **options)
    torch.manual_seed(7 if load is None else 99)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(4, 8),
        torch.nn.LayerNorm(8),
        torch.nn.Dropout(case.dropout),
        torch.nn.Linear(8, 1),
    )
    set_seed(7 if load is None else 99, device_specific=True)
    samples = Samples(case.size, is_random=case.workers == 0 or "seed" in options)
    loader: Any = DataLoader(samples, 4, shuffle=True, num_workers=case.workers)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if load is not None:
        accelerator.load_state(load)
    steps: list[Any] = []
    for _ in range(loader.epoch, EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            indices = batch[:, 0].tolist()
            of_all = accelerator.gather_for_metrics(indices, use_gather_object=True)
            steps.append((loss.item().hex(), indices, of_all))
            if len(steps) == case.at and save is not None:
                accelerator.save_state(save)
    return Trained(steps, [t.flatten().tolist() for t in model.state_dict().values()])


def whole() -> dict[str, Trained]:
    """Train to the end, and save on the way."""
    seen = {
        name: train(case, save=Path("saved", f"{WORLD} {name}")) for name, case in ANY_RANKS.items()
    }
    Accelerator().end_training()
    return seen


def again_and_whole() -> tuple[dict[str, tuple[Trained, Trained]], dict[str, Trained]]:
    """Also go on from what the same ranks have saved, in the same processes."""
    again = {
        name: (train(case, save=Path("saved", name)), train(case, load=Path("saved", name)))
        for name, case in SAME_RANKS.items()
    }
    return again, whole()


def resumed_from(worlds: Sequence[int]) -> dict[tuple[int, str], Trained]:
    """Go on from what other numbers of ranks have saved."""
    seen = {
        (world, name): train(case, load=Path("saved", f"{world} {name}"))
        for name, case in ANY_RANKS.items()
        for world in worlds
    }
    Accelerator().end_training()
    return seen


def require_unchanged(resumed: Trained, whole: Trained) -> None:
    steps = resumed.steps
    assert len(steps) > 1
    assert steps == whole.steps[-len(steps) :]
    assert resumed.weights == whole.weights


def require_every_sample_once(resumed: Trained, begun: Trained, case: Case) -> None:
    seen = [of_all for _, _, of_all in begun.steps[: case.at] + resumed.steps]
    assert [len(of_all) for of_all in seen] == [12, 12, 12, case.size - 36] * EPOCHS
    samples = list(chain.from_iterable(seen))
    for epoch in (samples[: case.size], samples[case.size :]):
        assert Counter(epoch) == Counter(map(float, range(case.size)))


def require_nearly_equal_weights(resumed: Trained, whole: Trained) -> None:
    for weight, other in zip(resumed.weights, whole.weights, strict=True):
        for a, b in zip(weight, other, strict=True):
            assert math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6)


def require_that_each_goes_on_from_the_others(
    pairs: list[tuple[int, int]], begun: Mapping[int, dict[str, Trained]], folder: Path
) -> None:
    """Let the second number of ranks of each pair go on from the checkpoints of the first."""
    for after in sorted({after for _, after in pairs}):
        befores = sorted(before for before, to in pairs if to == after)
        resumed = run_in_ranks(after, folder, resumed_from, befores, limit_s=400)[0]
        for before in befores:
            for name, case in ANY_RANKS.items():
                found = resumed[before, name]
                require_every_sample_once(found, begun[before][name], case)
                if case.size % 12 == 0:
                    require_nearly_equal_weights(found, begun[before][name])


def test_two_ranks_go_on_bit_for_bit_and_others_see_each_sample_once(tmp_path: Path) -> None:
    ranks = run_in_ranks(2, tmp_path, again_and_whole, limit_s=400)
    for again, _ in ranks:
        for undisturbed, resumed in again.values():
            require_unchanged(resumed, undisturbed)
    require_that_each_goes_on_from_the_others([(2, 1), (2, 3)], {2: ranks[0][1]}, tmp_path)


@pytest.mark.long
def test_any_number_of_ranks_goes_on_from_any_other(tmp_path: Path) -> None:
    worlds = (1, 2, 3, 4)
    begun = {world: run_in_ranks(world, tmp_path, whole, limit_s=400)[0] for world in worlds}
    pairs = [(before, after) for before in worlds for after in worlds if before != after]
    require_that_each_goes_on_from_the_others(pairs, begun, tmp_path)
