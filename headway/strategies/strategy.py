"""How ranks share a model: `Strategy` is complete for one rank; DDP overrides what differs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from headway.world import World


def strategy_for(world: World) -> Strategy:
    """Return the strategy for a world of one rank, or of several."""
    return Strategy(world) if world.ranks.world_size == 1 else DDP(world)


class Strategy:
    """One rank has the whole model to itself."""

    def __init__(self, world: World) -> None:
        self._world = world

    def prepare_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return `model` so that its gradients agree on all ranks."""
        return model

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model that `prepare_model` was given."""
        return model

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes leave gradients on their rank."""
        return nullcontext()


class DDP(Strategy):
    """Every rank has a copy of the model; gradients are averaged during the backward pass.

    Rank 0's weights are copied to the others at the start.
    """

    def prepare_model(self, model: torch.nn.Module) -> torch.nn.Module:
        has_gradients = any(parameter.requires_grad for parameter in model.parameters())
        if isinstance(model, DistributedDataParallel) or not has_gradients:
            return model
        device = self._world.device
        return DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None
        )

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        outer: Any = model
        inner = uncompiled(model)
        if not isinstance(inner, DistributedDataParallel):
            return model
        unwrapped: torch.nn.Module = inner.module
        # compiled as before
        return unwrapped if inner is model else type(outer)(unwrapped, outer.dynamo_ctx)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        inner = uncompiled(model)
        return inner.no_sync() if isinstance(inner, DistributedDataParallel) else nullcontext()


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model that `torch.compile` was given, or `model` itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, torch.nn.Module) else model
