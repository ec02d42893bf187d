"""An optimizer or a scheduler is given its own checkpoint, and that of another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from headway import Accelerator
from headway.checkpoint.values import encode
from headway.errors import CheckpointError


class Run:
    """A training with one optimizer and one schedule."""

    def __init__(
        self,
        optimizer: Callable[[Any], Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler],
        *,
        sparse: bool = False,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.accelerator = Accelerator(cpu=True)
        table = torch.nn.Embedding(6, 4, sparse=sparse)
        made = optimizer(table.parameters())
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            table, made, scheduler(made)
        )

    def step(self, count: int) -> None:
        for _ in range(count):

            def loss() -> torch.Tensor:
                self.optimizer.zero_grad()
                value: torch.Tensor = self.model(torch.tensor([1, 2, 5])).square().mean()
                self.accelerator.backward(value)
                return value

            closure = isinstance(self.optimizer.optimizer, torch.optim.LBFGS)
            self.optimizer.step(loss) if closure else (loss(), self.optimizer.step())
            with_metric = isinstance(self.scheduler.scheduler, lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(*[1.0] * with_metric)

    def all(self) -> str:
        """Return all that a load could change, with each bit."""
        tensors: dict[str, torch.Tensor] = {}
        states = [part.state_dict() for part in (self.model, self.optimizer, self.scheduler)]
        counts = (self.optimizer.step_count, self.scheduler.seen_steps)
        values = encode([*states, counts], "", tensors)
        return repr((values, [(t.dtype, t.tolist()) for t in tensors.values()]))


def steady(optimizer: Optimizer) -> LRScheduler:
    return lr_scheduler.ConstantLR(optimizer)


STEP = partial(lr_scheduler.StepLR, step_size=2)
COSINE = partial(lr_scheduler.CosineAnnealingLR, T_max=9)


def in_sequence(*makers: Any) -> Callable[[Optimizer], LRScheduler]:
    return lambda opt: lr_scheduler.SequentialLR(opt, [make(opt) for make in makers], [3])


def chained(*makers: Any) -> Callable[[Optimizer], LRScheduler]:
    return lambda opt: lr_scheduler.ChainedScheduler([make(opt) for make in makers], opt)


OPTIMIZERS = ("SGD", "AdamW", "LBFGS", "SparseAdam")
SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "ReduceLROnPlateau": partial(lr_scheduler.ReduceLROnPlateau, patience=0),
    "SequentialLR": in_sequence(steady, STEP),
    "SequentialLR of others": in_sequence(steady, COSINE),
    "ChainedScheduler": chained(steady, STEP),
    "ChainedScheduler in another order": chained(STEP, steady),
}


def outcomes(makers: Mapping[str, Callable[[int], Run]], tmp_path: Path) -> dict[str, list[str]]:
    """Return how each ends that loads its own checkpoint, and then the one before it."""
    saved: dict[str, str] = {}
    ends: dict[str, str] = {}
    for name, make in makers.items():
        run = make(0)
        run.step(2)
        saved[name] = run.accelerator.save_state(tmp_path / name)
        run.step(3)
        ends[name] = run.all()
    found: dict[str, list[str]] = {}
    names = [*makers]
    for at, name in enumerate(names):
        for other in (name, names[at - 1]):
            run = makers[name](1)
            run.step(1)
            before = run.all()
            try:
                run.accelerator.load_state(saved[other])
            except CheckpointError:
                outcome = "refused" if run.all() == before else "refused and changed"
            else:
                run.step(3)
                outcome = "equal" if run.all() == ends[other] else "loaded"
            found.setdefault(name, []).append(outcome)
    return found


def with_optimizer(name: str) -> Callable[[int], Run]:
    is_sparse = name == "SparseAdam"
    return lambda seed: Run(getattr(torch.optim, name), steady, sparse=is_sparse, seed=seed)


def with_scheduler(make: Callable[[Optimizer], LRScheduler]) -> Callable[[int], Run]:
    return lambda seed: Run(partial(torch.optim.SGD, lr=0.1, momentum=0.9), make, seed=seed)


def test_optimizers_go_on_alike_and_refuse_the_state_of_another(tmp_path: Path) -> None:
    makers = {name: with_optimizer(name) for name in OPTIMIZERS}
    assert outcomes(makers, tmp_path) == {name: ["equal", "refused"] for name in makers}


def test_schedulers_go_on_alike_and_refuse_the_state_of_another(tmp_path: Path) -> None:
    makers = {name: with_scheduler(make) for name, make in SCHEDULERS.items()}
    assert outcomes(makers, tmp_path) == {name: ["equal", "refused"] for name in makers}
