"""A run goes on in the middle of an epoch, whatever draws the samples, with several loaders too."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler  # noqa: E402

from headway import Accelerator  # noqa: E402

SIZE = 12


class Augmented(Dataset[Any]):
    def __init__(self, size: int = SIZE) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), torch.rand(()).item() + random.random()])


class Order(Sampler[int]):
    """Draws from the global generator, as a pass begins."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE).tolist())

    def __len__(self) -> int:
        return SIZE


class Uneven(Order):
    """A batch sampler of one to three samples, which draws from Python's generator."""

    def __iter__(self) -> Iterator[Any]:
        order = random.sample(range(SIZE), SIZE)
        for start, stop in ((0, 3), (3, 4), (4, 6), (6, 9), (9, 10), (10, 12)):
            yield order[start:stop]

    def __len__(self) -> int:
        return 6


def loaders(kind: str) -> list[Any]:
    data = Augmented()
    weighted = WeightedRandomSampler([1.0 + index for index in range(SIZE)], SIZE)
    return {
        "in step": lambda: [
            DataLoader(data, 2, shuffle=True),
            DataLoader(Augmented(18), 3, shuffle=True),
        ],
        "one in the other": lambda: [
            DataLoader(data, 2, shuffle=True),
            DataLoader(Augmented(6), 4, shuffle=True),
        ],
        "weighted": lambda: [DataLoader(data, 2, sampler=weighted)],
        "own sampler": lambda: [DataLoader(data, 2, sampler=Order())],
        "own batches": lambda: [DataLoader(data, batch_sampler=Uneven())],
        "single samples": lambda: [DataLoader(data, batch_size=None, sampler=Order())],
    }[kind]()


def passes(kind: str, loaders: list[Any]) -> Iterator[Any]:
    """Yield what each step sees, and the random number that it draws."""
    for _ in range(loaders[0].epoch, 2):
        for batches in zip(*loaders) if kind == "in step" else loaders[0]:  # noqa: B905
            seen = [one.tolist() for one in batches]
            if kind == "one in the other":
                seen += [batch.tolist() for batch in loaders[1]]
            yield seen, torch.rand(()).item()


def prepared(kind: str, generators: int, seed: int | None) -> tuple[Accelerator, list[Any]]:
    torch.manual_seed(generators)
    random.seed(generators)
    accelerator = Accelerator(cpu=True, seed=seed)
    return accelerator, [accelerator.prepare(one) for one in loaders(kind)]


@pytest.mark.parametrize("seed", [None, 3], ids=["", "seed"])
@pytest.mark.parametrize(
    "kind",
    ["in step", "one in the other", "weighted", "own sampler", "own batches", "single samples"],
)
def test_a_run_goes_on_with_the_same_samples_and_numbers(
    kind: str, seed: int | None, tmp_path: Path
) -> None:
    accelerator, whole_loaders = prepared(kind, 1, seed)
    whole = []
    for step in passes(kind, whole_loaders):
        whole.append(step)
        if len(whole) in (2, 5, 6):  # 6 is an epoch's last one
            accelerator.save_state(tmp_path / str(len(whole)))
    for at in (2, 5, 6):
        accelerator, others = prepared(kind, 9, seed)
        accelerator.load_state(tmp_path / str(at))
        assert list(passes(kind, others)) == whole[at:]
