"""The weights of models: unwrapped, whole where ranks share them, and written to files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from headway.checkpoint.files import save_weights
from headway.distributed.meeting import meet
from headway.training.models import extract_model_from_parallel
from headway.training.training import Training


class Weights:
    """Gives scripts the weights of the models of a training."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def unwrap_model(
        self,
        model: torch.nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> torch.nn.Module:
        """Return the model inside DistributedDataParallel or DataParallel, as it was prepared."""
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def empty_init(self) -> AbstractContextManager[Any]:
        """Return a context in which models are made without memory for their weights."""
        return self._training.strategy.empty_init()

    @contextmanager
    def whole(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """Give the model that `prepare` was given, with weights that this rank reads in full."""
        inner = self.unwrap_model(model, keep_torch_compile=False)
        if self._training.strategy.shards:
            meet("whole(...)")
        with self._training.strategy.whole(inner):
            yield inner

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state of a model. Call it on every rank: each may hold a part of it."""
        if unwrap:
            model = self.unwrap_model(model, keep_torch_compile=False)
        if self._training.strategy.shards:
            meet("get_state_dict(...)")
        return self._training.strategy.state_dict(model)

    def load_state_dict(self, model: torch.nn.Module, state_dict: dict[str, Any]) -> None:
        """Load what `get_state_dict` returned into a prepared model, on every rank."""
        self._training.strategy.load_state_dict(self.unwrap_model(model), state_dict)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of `model` on rank 0; every rank has to call this."""
        strategy = self._training.strategy
        model = self.unwrap_model(model, keep_torch_compile=False)
        if strategy.shards:
            meet("save_model(...)")
        save_weights(
            strategy.weights_to_save(model),
            save_directory,
            max_shard_size,
            safe_serialization,
            read_whole=strategy.read_whole,
            writes=self._training.world.is_main,
        )
