"""The base class of strategies for distributing a model over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, update_wrapper
from typing import Any, NamedTuple

import torch

from headway.distributed.world import World
from headway.errors import CheckpointError, Code
from headway.precision.precision import Precision
from headway.strategies.compilation import TorchDynamoPlugin, compiled, uncompiled
from headway.strategies.ddp_settings import DistributedDataParallelKwargs
from headway.strategies.units import checkpoint_activations, units_of


class StrategySettings(NamedTuple):
    ddp: DistributedDataParallelKwargs = DistributedDataParallelKwargs()
    dynamo: TorchDynamoPlugin = TorchDynamoPlugin()
    activation_checkpointing: bool = False
    wrap: str = "auto"  # see `units_of`
    shard_size: int | None = None  # ranks per replica of the model, for hsdp
    cpu_offload: bool = False
    forward_methods: tuple[str, ...] = ()  # called like forward() on distributed models


NULL_CTX = nullcontext()


class Strategy:
    """The strategy for one rank, and the base class of other strategies.

    Scripts can pass an instance of a custom subclass: `Accelerator(strategy=MyStrategy())`. The
    Accelerator first calls `set_up`, in which subclasses for several ranks set `data_rank` and
    `data_size`.
    """

    name = "no"  # in messages
    data_rank = 0  # index of this rank's part of each batch
    data_size = 1  # number of parts
    shards = False  # whether a rank has only a shard of each parameter
    compares_ranks = False  # whether ranks compare replicated weights, and hyperparameters

    def set_up(self, world: World, settings: StrategySettings) -> None:
        """Set up this strategy, which distributes models over the ranks of `world`."""
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
        """Apply `precision` and compilation to `model`, and distribute it over the ranks.

        If `device` is None, weights are not moved. If `trains` is False, the model is not
        distributed.
        """
        if trains and self._settings.activation_checkpointing:
            checkpoint_activations(units_of(uncompiled(model), self._settings.wrap))
        model = precision.prepare_model(model if device is None else model.to(device))
        prepared = compiled(self._share(model) if trains else model, self._settings.dynamo)
        places = {part: name for name, part in prepared.named_modules()}
        if prefix := places.get(uncompiled(model)):
            hook = partial(_require_own_names, f"{prefix}.")
            prepared.register_load_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
        return prepared

    def _share(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a model that synchronizes its gradients across ranks."""
        return model

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters of `optimizer` that `prepare_model` has replaced in models.

        `prepare()` calls this for all optimizers once all models are prepared. It is a no-op if
        models keep their parameters, as in this class and in DDP.
        """

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes do not synchronize gradients."""
        return NULL_CTX

    def sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which a backward pass synchronizes gradients even in `no_sync`."""
        return NULL_CTX

    def reduce_over_replicas(self, models: Iterable[torch.nn.Module], is_due: bool) -> None:
        """Set whether the next backward pass reduces gradients over replicas of sharded models.

        Gradients of the optimizer step's earlier passes are then reduced as well.
        """

    def broadcasts_buffers(self, model: torch.nn.Module) -> bool:
        """Return whether rank 0's buffers are broadcast before the next forward pass of `model`."""
        return True

    def set_broadcast_buffers(self, model: torch.nn.Module, value: bool) -> None:
        """Set the result of `broadcasts_buffers`; a no-op if that result is constant."""

    def clip_grad_norm_(
        self, parameters: list[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip the total gradient norm, and return the norm before clipping."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: list[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value]."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def total_norm(self, parameters: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Return the total gradient norm."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, norm_type)

    def unsharded(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which the weights of `model` are unsharded."""
        return NULL_CTX

    def state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the full state dict of `model`; every rank must call this."""
        with self.unsharded(model):
            return model.state_dict()

    def weights_to_save(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return this rank's state dict; tied tensors may appear under only one of their names."""
        return model.state_dict()

    def empty_init(self) -> AbstractContextManager[Any]:
        """Return a context in which models that will be sharded are created on the meta device."""
        return NULL_CTX


def _require_own_names(prefix: str, _: torch.nn.Module, keys: Any) -> None:
    """Raise CheckpointError if a loaded state dict has the names of the unwrapped model.

    With `strict=False`, torch would skip these weights.
    """
    if {*keys.missing_keys} & {prefix + name for name in keys.unexpected_keys}:
        raise CheckpointError(
            f"the names in the state dict have no prefix {prefix!r}, unlike the prepared model's",
            where="the script's load_state_dict(...) of a prepared model",
            fix="call load_state_dict() of unwrap_model(model, keep_torch_compile=False)",
            code=Code.MISMATCH,
        )


class ForwardMethods:
    """Wraps methods of a distributed model so that they run like its `forward()`.

    Methods and `forward()` may call each other, because only the outermost call is wrapped.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.is_in_method = self.is_in_forward = False
        model.register_forward_pre_hook(partial(self._note_forward, True), prepend=True)
        model.register_forward_hook(partial(self._note_forward, False), always_call=True)

    def register(self, name: str, plain: Callable[..., Any], shared: Callable[..., Any]) -> None:
        """Replace the method `name` with `shared`, or with `plain` in calls from other methods."""
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
