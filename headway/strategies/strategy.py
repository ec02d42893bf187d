"""How ranks share a model: `Strategy` is complete for one rank, others override what differs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from headway.plugins.compilation import TorchDynamoPlugin
from headway.plugins.handlers import DistributedDataParallelKwargs
from headway.precision.precision import Precision
from headway.strategies.compilation import compiled
from headway.world import World


class StrategySettings(NamedTuple):
    """What is set about how ranks share models, and how these are compiled."""

    strategy: str = "auto"  # or a name in STRATEGIES; auto is ddp
    ddp: DistributedDataParallelKwargs = DistributedDataParallelKwargs()
    dynamo: TorchDynamoPlugin = TorchDynamoPlugin()


class Strategy:
    """One rank has the whole model to itself.

    Attributes:
        data_rank: which share of every batch this rank reads.
        data_size: how many shares there are; ranks that hold parts of one model read the same one.
    """

    data_rank = 0
    data_size = 1

    def __init__(self, world: World, settings: StrategySettings) -> None:
        self._world = world
        self._settings = settings

    def prepare_model(
        self,
        model: torch.nn.Module,
        precision: Precision,
        device: torch.device | None,
        *,
        trains: bool = True,
    ) -> torch.nn.Module:
        """Return `model` computing in `precision` and compiled as set, shared by the ranks.

        Args:
            device: where the weights go; None leaves them where they are.
            trains: make its gradients the same on all ranks.
        """
        model = precision.prepare_model(model if device is None else model.to(device))
        return compiled(self._share(model) if trains else model, self._settings.dynamo)

    def _share(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return `model` with gradients that are the same on all ranks."""
        return model

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model that `prepare_model` was given."""
        return model

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Let `optimizer` update the parameters that prepared models have in place of its own.

        Called once all models of a `prepare()` are prepared, for all optimizers so far. Nothing
        to do where models keep their parameters, as here and in DDP.
        """

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes leave gradients on their rank."""
        return nullcontext()

    def sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward pass exchanges gradients in spite of `no_sync`."""
        return nullcontext()

    def average_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Average gradients that backward passes left on their rank; every rank calls this."""

    def clip_grad_norm_(
        self, parameters: list[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip the norm of all gradients together, and return what it was."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def total_norm(self, parameters: Iterable[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Return the norm of all gradients together."""
        gradients = [one.grad for one in parameters if one.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, norm_type)

    def whole(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which this rank can read all weights of `model` in full."""
        return nullcontext()

    def state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the full state of `model`; every rank has to call this."""
        with self.whole(model):
            return model.state_dict()

    def load_state_dict(self, model: torch.nn.Module, state_dict: dict[str, Any]) -> None:
        """Load a full state, as `state_dict` returned it, on every rank."""
        model.load_state_dict(state_dict)
