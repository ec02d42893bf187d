"""A small training, for the tests of what goes on and of what stops."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from headway import Accelerator
from headway.checkpoint.preemption import ResumedRun
from headway.contract.origin import Layer, Origin
from headway.contract.run import RunContract, encode

STEPS_PER_EPOCH, BATCH = 5, 2
FRESH = ResumedRun()
PROJECT = Path("runs/mine")
CHECKPOINTS = PROJECT / "checkpoints"


class Training:
    """A small training with an evaluation in each epoch, in which nothing is trained."""

    def __init__(self, **options: Any) -> None:
        options = {"project_dir": PROJECT} | options
        self.accelerator = Accelerator(cpu=True, **options)
        model = torch.nn.Linear(2, 1)
        data: Any = torch.arange(2.0 * STEPS_PER_EPOCH * BATCH).reshape(-1, 2)
        self.model, self.optimizer, self.test_loader, self.loader = self.accelerator.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-4),
            DataLoader(data[:3], BATCH),
            DataLoader(data, BATCH, shuffle=True),
        )

    def steps(self, run: ResumedRun = FRESH, epochs: int = 3) -> Iterator[int]:
        for _ in range(run.epoch, epochs):
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(self.model(batch).mean())
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                yield self.optimizer.step_count
                if self.optimizer.step_count % 2:
                    for _ in self.test_loader:
                        pass

    def train_to(self, step: int, run: ResumedRun = FRESH, **options: Any) -> list[str]:
        saved = []
        for done in self.steps(run):
            folder = self.accelerator.checkpoint(**options)
            saved += [] if folder is None else [Path(folder).name]
            if done == step:
                break
        return saved


def names() -> list[str]:
    return sorted(one.name for one in CHECKPOINTS.iterdir())


def launched(**fields: Any) -> str:
    origins = {"resume": Origin(Layer.FLAG, flag="--resume")}
    return encode(RunContract("cpu", "no", 1, origins, **fields))
