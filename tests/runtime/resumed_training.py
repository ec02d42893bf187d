"""A small training, for the tests of what goes on and of what stops."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from headway import Accelerator
from headway.checkpoint.preemption import ResumedRun
from headway.ipc.origin import Layer, Origin
from headway.ipc.run_contract import RunContract, encode
from headway.utils import set_seed

STEPS_PER_EPOCH, BATCH = 5, 2
FRESH = ResumedRun()
PROJECT = Path("runs/mine")
CHECKPOINTS = PROJECT / "checkpoints"


class Counter:
    """What a script registers."""

    def __init__(self) -> None:
        self.state: Any = {"best": 0.5, "seen": torch.zeros(2), "names": ("a", "b")}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Training:
    """A small training; `losses` has the loss and the samples of each batch."""

    def __init__(
        self,
        seed: int = 0,
        *,
        kind: type[Accelerator] = Accelerator,
        data: Any = None,
        loader: dict[str, Any] | None = None,
        project_dir: Any = PROJECT,
        **options: Any,
    ) -> None:
        set_seed(seed)
        self.accelerator = kind(cpu=True, project_dir=project_dir, **options)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(8, 1),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = torch.arange(4.0 * STEPS_PER_EPOCH * BATCH).reshape(-1, 4) if data is None else data
        loader = {"shuffle": True, "batch_size": BATCH} if loader is None else loader
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        evaluation: Any = DataLoader(torch.arange(3.0), BATCH)  # type: ignore[arg-type]
        self.model, self.optimizer, self.test_loader, self.loader, self.scheduler = (
            self.accelerator.prepare(
                *(model, optimizer, evaluation, DataLoader(data, **loader)),
                CosineAnnealingLR(optimizer, 40),
            )
        )
        self.losses: list[tuple[str, list[float]]] = []

    def batches(self, loader: Any = None) -> Iterator[int]:
        """Train on one epoch; each batch is counted once it is trained on."""
        for batch in self.loader if loader is None else loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(batch).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.counter.state["seen"] += 1
            self.losses.append((loss.item().hex(), batch[:, 0].tolist()))
            yield len(self.losses)

    def epochs(self, count: int) -> None:
        for _ in range(count):
            for _ in self.batches():
                pass

    def weights(self) -> list[str]:
        return [repr(t.tolist()) for t in self.model.state_dict().values()]

    def steps(self, run: ResumedRun = FRESH, epochs: int = 3) -> Iterator[int]:
        """Train, with an evaluation in each epoch, in which nothing is trained."""
        for _ in range(run.epoch, epochs):
            for _ in self.batches():
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
        self.accelerator.wait_for_checkpoint()  # one may be due since the last batch
        return saved


def names() -> list[str]:
    return sorted(path.name for path in CHECKPOINTS.iterdir())


def launched(**fields: Any) -> str:
    origins = {"resume": Origin(Layer.FLAG, flag="--resume")}
    return encode(RunContract("cpu", "no", 1, origins, **fields))
