"""The state of a training run: its prepared and registered objects, and its progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from headway.data.active_loader import TrainingLoader
from headway.data.loader import PreparedDataLoader
from headway.data.loader_set import LoaderSet
from headway.distributed.call_barrier import call_barrier
from headway.distributed.handler import check_range
from headway.distributed.world import World
from headway.errors import Code, UsageError
from headway.ipc.progress import process_progress
from headway.memory import clear_device_cache
from headway.precision.precision import Precision
from headway.strategies.compilation import extract_model_from_parallel
from headway.strategies.strategy import Strategy
from headway.training.accumulation import Accumulation
from headway.training.optimizer import PreparedOptimizer, PreparedScheduler

Kind = TypeVar("Kind")


@dataclass(eq=False)
class Training:
    """The objects of a training run on this rank.

    Checkpoints save these objects; see `headway.checkpoint.training_state`.
    """

    world: World
    strategy: Strategy
    precision: Precision
    accumulation: Accumulation
    global_batch_size: int | None = None
    prepared: list[tuple[Any, Any]] = field(default_factory=list)  # (original, wrapper) pairs
    registered: list[Any] = field(default_factory=list)  # with `register_for_checkpointing`
    has_prepared: bool = False  # at any time, even if dropped since
    evaluation_models: set[torch.nn.Module] = field(default_factory=set)  # not synchronized
    ranks_may_differ: bool = False  # ranks currently take different numbers of steps

    def __post_init__(self) -> None:
        self.progress = process_progress()
        self.run = LoaderSet(self.progress)
        self.run.num_pending = self._num_pending
        self.accumulation.report = self.run.report

    # ------------------------------------------------------------------ objects

    def find(self, obj: Any) -> Any:
        """Return the prepared wrapper of `obj`, or None if `obj` is not prepared."""
        pairs = (pair for pair in self.prepared if obj is pair[0] or obj is pair[1])
        return next(pairs, (None, None))[1]

    def remember(self, original: Any, prepared: Any) -> None:
        """Map an object of the script to its prepared wrapper."""
        self.prepared.append((original, prepared))
        self.has_prepared = True
        if isinstance(prepared, torch.nn.Module):
            _PREPARED_MODELS.add(prepared)
        self.run.counts_training |= isinstance(prepared, PreparedOptimizer)

    def adopt_prepared(self, objects: Iterable[Any]) -> None:
        """Register objects that another Accelerator has prepared, without wrapping them again."""
        for obj in objects:
            if self.find(obj) is not None:
                continue
            if isinstance(obj, torch.nn.Module) and obj in _PREPARED_MODELS:
                inner = extract_model_from_parallel(obj)
                if inner is not obj or self.strategy.shards:
                    self.prepared.append((inner, obj))
            elif isinstance(obj, PreparedOptimizer):
                obj.follow(self.accumulation, self.precision)
                self.prepared.append((obj.optimizer, obj))
            elif isinstance(obj, TrainingLoader | PreparedScheduler):
                if isinstance(obj, PreparedDataLoader):
                    obj.follow(self.run)
                self.prepared.append((obj, obj))

    def forget(self) -> None:
        """Drop all prepared objects, free their memory, and reset gradient accumulation."""
        self.prepared.clear()
        self.evaluation_models.clear()
        self.accumulation.reset()
        clear_device_cache(garbage_collection=True)

    @property
    def num_objects(self) -> int:
        return len(self.prepared) + len(self.registered)

    @property
    def models(self) -> list[torch.nn.Module]:
        return self._all(torch.nn.Module)

    @property
    def inner_models(self) -> list[torch.nn.Module]:
        return [extract_model_from_parallel(m, keep_torch_compile=False) for m in self.models]

    def inner(self, model: torch.nn.Module, call: str) -> torch.nn.Module:
        """Return the unwrapped model; if models are sharded, wait until all ranks reach `call`."""
        if self.strategy.shards:
            call_barrier(call)
        return extract_model_from_parallel(model, keep_torch_compile=False)

    @property
    def optimizers(self) -> list[PreparedOptimizer]:
        return self._all(PreparedOptimizer)

    @property
    def schedulers(self) -> list[PreparedScheduler]:
        return self._all(PreparedScheduler)

    @property
    def all_loaders(self) -> list[Any]:
        return self._all(TrainingLoader)

    @property
    def loaders(self) -> list[PreparedDataLoader]:
        """The loaders that resume at their positions: all except those of `headway.compat`."""
        return self._all(PreparedDataLoader)

    def _all(self, kind: type[Kind]) -> list[Kind]:
        return [prepared for _, prepared in self.prepared if isinstance(prepared, kind)]

    def set_accumulation_steps(self, steps: int) -> None:
        check_range("gradient_accumulation_steps", 1, steps=steps)
        if self.global_batch_size is not None and steps != self.accumulation.steps:
            raise UsageError(
                f"gradient_accumulation_steps was set to {steps}, but the loaders' batch sizes were"
                f" computed from gradient_accumulation_steps={self.accumulation.steps} and"
                f" global_batch_size={self.global_batch_size}",
                where="the script's assignment to .gradient_accumulation_steps",
                fix=f"pass Accelerator(gradient_accumulation_steps={steps}, global_batch_size=...)",
                code=Code.BATCH_SIZE,
            )
        self.accumulation.steps = steps

    # ------------------------------------------------------------------ progress

    @property
    def steps_done(self) -> int:
        return max((optimizer.step_count for optimizer in self.optimizers), default=0)

    @property
    def loader(self) -> PreparedDataLoader | None:
        """The loader that determines the epoch: the leading one, or else one used in training."""
        return max(self.loaders, key=attrgetter("epochs.leads", "epochs.has_trained"), default=None)

    @property
    def epoch(self) -> int:
        """The epoch number for a checkpoint."""
        loaders = [self.loader, *self.all_loaders]
        return next((loader.epoch for loader in loaders if loader is not None), 0)

    def count_epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs; see `ResumedRun.epochs`."""
        return self.run.count_epochs(total, [loader.epochs for loader in self.loaders])

    def _num_pending(self) -> int:
        return self.accumulation.num_backward

    @property
    def has_trained_epochs(self) -> bool:
        """Whether a prepared loader has been used in training, including earlier runs."""
        return any(loader.epochs.has_trained for loader in self.loaders)

    @property
    def is_in_evaluation(self) -> bool:
        """Whether an evaluation loop is running after training has started."""
        is_open = any(
            each.rounds and not each.is_complete and each.seen == self.progress.num_trained
            for each in self.run.open
            if not each.owner.has_trained
        )
        return is_open and self.has_trained_epochs


_PREPARED_MODELS: WeakSet[torch.nn.Module] = WeakSet()
"""The prepared models of all Accelerators in this process."""


def prepared_weights() -> set[int]:
    """Return the ids of the weights of all prepared models in this process."""
    return {id(weight) for model in _PREPARED_MODELS for weight in model.parameters()}
