"""Trains with random samples in several configurations, saves in the middle of epochs, and goes on.

python tests/distributed/resuming_worker.py FOLDER whole|again|from WORLD ...

`whole` trains to the end and saves on the way; `again` also goes on from there, in the same
processes; `from 2 3` goes on from what 2 ranks and 3 ranks have saved. Each rank writes what it saw
to FOLDER/WORLD-RANK.json: for each configuration its steps (the loss, and the samples of all ranks)
and its weights.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from headway import Accelerator
from headway.state import AcceleratorState
from headway.utils import DataLoaderConfiguration, set_seed
from tests.distributed.resuming_cases import ANY_RANKS, SAME_RANKS, Case
from tests.distributed.this_rank import FOLDER, RANK, WORLD

EPOCHS = 2


class Samples(Dataset[torch.Tensor]):
    def __init__(self, size: int, is_random: bool) -> None:
        self._size, self._is_random = size, is_random

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(2) + random.random() if self._is_random else torch.zeros(2)
        return torch.cat([torch.tensor([float(index), index % 3]), noise])


def train(case: Case, *, save: Path | None = None, load: Path | None = None) -> dict[str, Any]:
    """Train to the end, from the beginning or from a checkpoint; return what this rank saw."""
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
            steps.append([loss.item().hex(), indices, of_all])
            if len(steps) == case.at and save is not None:
                accelerator.save_state(save)
    weights = [one.flatten().tolist() for one in model.state_dict().values()]
    return {"steps": steps, "weights": weights}


def main(mode: str, *worlds: str) -> dict[str, Any]:
    folder = FOLDER / "saved"
    seen: dict[str, Any] = {}
    if mode == "again":
        for name, case in SAME_RANKS.items():
            whole = train(case, save=folder / name)
            seen[name] = whole, train(case, load=folder / name)
    for name, case in ANY_RANKS.items():
        if mode != "from":
            seen[name] = train(case, save=folder / f"{WORLD} {name}")
        for world in worlds:
            seen[f"{world} {name}"] = train(case, load=folder / f"{world} {name}")
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = main(*sys.argv[2:])
    (FOLDER / f"{WORLD}-{RANK}.json").write_text(json.dumps(found))
    Accelerator().end_training()
