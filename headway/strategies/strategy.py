"""How ranks share a model: `Strategy` is complete for one rank, others override what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, update_wrapper
from typing import Any, NamedTuple

import torch

from headway.distributed.world import World
from headway.ipc.progress import Progress
from headway.precision.precision import Precision
from headway.strategies.compilation import TorchDynamoPlugin, compiled, uncompiled
from headway.strategies.ddp_settings import DistributedDataParallelKwargs
from headway.strategies.units import checkpoint_activations, units_of


class StrategySettings(NamedTuple):
    ddp: DistributedDataParallelKwargs = DistributedDataParallelKwargs()
    dynamo: TorchDynamoPlugin = TorchDynamoPlugin()
    activation_checkpointing: bool = False
    wrap: str = "auto"  # see `units_of`
    shard_size: int | None = None  # ranks that share one copy of the model, for hsdp
    cpu_offload: bool = False
    forward_methods: tuple[str, ...] = ()  # called beside forward(), where models are sharded
    progress: Progress | None = None  # of the training; None: nobody watches it


NOTHING = nullcontext()
Models = Callable[[], Iterable[torch.nn.Module]]


class Strategy:
    """One rank has the whole model to itself.

    A script can pass an instance of its own subclass: `Accelerator(strategy=MyStrategy())`. The
    Accelerator calls `set_up` first, in which a subclass for several ranks sets `data_rank` and
    `data_size`.
    """

    name = "no"  # in messages
    data_rank = 0  # which share of every batch this rank reads
    data_size = 1  # how many shares there are
    shards = False  # whether a rank holds a part of each parameter only
    has_copies = False  # whether ranks compare their copies of each parameter

    def set_up(self, world: World, settings: StrategySettings) -> None:
        """Share models among the ranks of `world`."""
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

        Without a device the weights stay where they are. `trains`: its gradients are the same on
        all ranks.
        """
        if trains and self._settings.activation_checkpointing:
            checkpoint_activations(units_of(uncompiled(model), self._settings.wrap))
        model = precision.prepare_model(model if device is None else model.to(device))
        return compiled(self._share(model) if trains else model, self._settings.dynamo)

    def _share(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return `model` with gradients that are the same on all ranks."""
        return model

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Make `optimizer` update the parameters that prepared models have in place of its own.

        Called once all models of a `prepare()` are prepared, for all optimizers so far. Does
        nothing if models keep their parameters, as here and in DDP.
        """

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes leave gradients on their rank."""
        return NOTHING

    def no_sync_in_micro_batch(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch that is not the last one of its optimizer step."""
        return self.no_sync(model)

    def sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward pass exchanges gradients in spite of `no_sync`."""
        return NOTHING

    def reduce_over_replicas(self, models: Models, is_due: bool) -> None:
        """Reduce gradients over the copies of sharded models in the next backward pass, or later.

        Those of earlier passes of the optimizer step are then reduced with them.
        """

    def broadcasts_buffers(self, model: torch.nn.Module) -> bool:
        """Return whether all ranks get rank 0's buffers before they compute with `model` again."""
        return True

    def set_broadcast_buffers(self, model: torch.nn.Module, value: bool) -> None:
        """Set what `broadcasts_buffers` returns, if it changes in training."""

    def clip_grad_norm_(
        self, parameters: list[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip the norm of all gradients together, and return what it was."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: list[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value]."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def total_norm(self, parameters: Iterable[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Return the norm of all gradients together."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, norm_type)

    def whole(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which this rank can read all weights of `model` in full."""
        return NOTHING

    def state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the full state of `model`; every rank must call this."""
        with self.whole(model):
            return model.state_dict()

    def own_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the state of `model` as this rank holds it: where it is sharded, as DTensors."""
        return self.state_dict(model)

    def weights_to_save(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return `own_state_dict`; each tensor may be under one of its names alone."""
        return self.own_state_dict(model)

    def read_full(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a state in full; every rank must call this."""
        return tensor

    def empty_init(self) -> AbstractContextManager[Any]:
        """Return a context in which models are made without memory for parameters, if sharded."""
        return NOTHING

    def load_state_dict(self, model: torch.nn.Module, state_dict: dict[str, Any]) -> None:
        """Load a full state, as `state_dict` returned it, on every rank."""
        model.load_state_dict(state_dict)


class ForwardMethods:
    """Makes methods of a model run as its `forward()` does, where ranks share its weights.

    Methods and `forward()` may call each other: the one that is called first does what is shared.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.is_in_method = self.is_in_forward = False
        model.register_forward_pre_hook(partial(self._note_forward, True), prepend=True)
        model.register_forward_hook(partial(self._note_forward, False), always_call=True)

    def register(self, name: str, plain: Callable[..., Any], shared: Callable[..., Any]) -> None:
        """Make `shared` the model's method of this name, or `plain` within another one."""
        setattr(self._model, name, _ForwardMethod(self, plain, shared))

    def _note_forward(self, is_running: bool, *_: Any) -> None:
        self.is_in_forward = is_running


class _ForwardMethod:
    def __init__(
        self, methods: ForwardMethods, plain: Callable[..., Any], shared: Callable[..., Any]
    ) -> None:
        update_wrapper(self, plain)
        self._methods, self._plain, self._shared = methods, plain, shared

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        methods = self._methods
        if methods.is_in_forward or methods.is_in_method:
            return self._plain(*args, **kwargs)
        methods.is_in_method = True
        try:
            return self._shared(*args, **kwargs)
        finally:
            methods.is_in_method = False

    def __reduce__(self) -> Any:  # a copied or unpickled model has its own method
        return partial, (self._plain,)
