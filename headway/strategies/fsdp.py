"""Fully sharded data parallelism (FSDP2): each rank has a shard of every parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from headway.distributed.call_barrier import call_barrier, runs_ahead, watch
from headway.distributed.collectives import full_tensor
from headway.distributed.world import World, group_backend
from headway.errors import Code, UsageError
from headway.ipc.stderr import log
from headway.precision.precision import Precision
from headway.strategies.compilation import compile_blocks, compiled, uncompiled
from headway.strategies.strategy import ForwardMethods, Strategy, StrategySettings
from headway.strategies.units import checkpoint_activations, units_of
from headway.strategies.weights import (
    ModelWeights,
    parameters_of,
    parameters_without_data,
    saved_buffers,
)

PREPARE = "the script's prepare(...)"


class FSDP(Strategy):
    """Shards parameters, gradients and optimizer states, and gathers each unit while it is used.

    Every rank reads its own part of each batch. Gradients are reduce-scattered in each backward
    pass, so accumulated gradients are sharded as well.
    """

    name = "fsdp"
    shards = True

    def set_up(self, world: World, settings: StrategySettings) -> None:
        super().set_up(world, settings)
        self.data_rank, self.data_size = world.ranks.rank, world.ranks.world_size
        self.compares_ranks = settings.ddp.compare_weights
        if settings.cpu_offload and world.device.type == "cpu":
            raise UsageError(
                "cpu_offload requires GPUs, but this run is on the CPU",
                where="the setting cpu_offload",
                fix="remove cpu_offload, or run on GPUs",
                code=Code.OFFLOAD_WITHOUT_GPU,
            )
        self._mesh = world.mesh(data=self.data_size)
        self._withheld: WeakSet[torch.nn.Module] = WeakSet()  # gradients are not synchronized

    def prepare_model(
        self,
        model: torch.nn.Module,
        precision: Precision,
        device: torch.device | None,
        *,
        trains: bool = True,
    ) -> torch.nn.Module:
        if not trains:
            return super().prepare_model(model, precision, device, trains=False)
        inner = uncompiled(model)
        if isinstance(inner, FSDPModule):
            return model
        units = units_of(inner, self._settings.wrap)
        _require_shardable(inner)
        _require_one_dtype([*units, inner])
        precision.prepare_model(inner)
        if self._settings.activation_checkpointing:
            checkpoint_activations(units)
        dynamo = self._settings.dynamo
        by_unit = dynamo.use_regional_compilation is not False
        is_compiled = compile_blocks(units if by_unit else [], dynamo)
        self._shard(inner, units)
        self._log_units(inner, units)
        return model if is_compiled else compiled(model, dynamo)

    def _shard(self, model: torch.nn.Module, units: Sequence[torch.nn.Module]) -> None:
        call_barrier("prepare(...)")
        offload = CPUOffloadPolicy() if self._settings.cpu_offload else OffloadPolicy()
        weights = ModelWeights(model, self._world.device)
        for unit in (*units, model):
            modules = _unsharded_modules(unit)
            before = parameters_of(modules)
            weights.fill(modules)
            fully_shard(unit, mesh=self._mesh, reshard_after_forward=True, offload_policy=offload)
            if group_backend(self._world.device) == "gloo":  # torch 2.8's AVG there is a sum
                unit.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
            for module, name, old in before:
                record_successor(old, getattr(module, name))
            type(unit).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]
        self._register_hooks(model)

    def _register_hooks(self, model: torch.nn.Module) -> None:
        """Register hooks for inference_mode(), for `forward_methods` and for buffer broadcasts."""
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        model.register_forward_pre_hook(partial(_allocate_buffers, units), prepend=True)
        names = dict.fromkeys(("generate", *self._settings.forward_methods))
        methods = [name for name in names if callable(getattr(model, name, None))]
        if methods:
            forward_methods = ForwardMethods(model)
            for name in methods:
                plain = getattr(model, name)
                register_fsdp_forward_method(model, name)
                gathering = partial(_call_gathered, model, units, getattr(model, name))
                forward_methods.register(name, plain, gathering)
        buffers = saved_buffers(model) if self._settings.ddp.broadcast_buffers else []
        if buffers:
            model.register_forward_pre_hook(partial(_broadcast_buffers, buffers), prepend=True)

    def _log_units(self, model: torch.nn.Module, units: Sequence[torch.nn.Module]) -> None:
        if self._world.ranks.rank:
            return
        counts = Counter(map(_name_of, units))
        described = ", ".join(f"{count} of {name}" for name, count in counts.items())
        log(
            f"{_name_of(model)} is sharded over {self._mesh.size(self._mesh.ndim - 1)} ranks, in"
            " units: " + (f"{described}, and the rest" if described else "the whole model")
        )

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        replace_parameters(optimizer)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        return self._synced(model, False)

    def sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        return self._synced(model, True)

    @contextmanager
    def _synced(self, model: torch.nn.Module, is_synced: bool) -> Iterator[None]:
        model = uncompiled(model)
        if not isinstance(model, FSDPModule):
            yield
            return
        was_withheld = model in self._withheld
        self._set_withheld(model, not is_synced)
        try:
            yield
        finally:
            self._set_withheld(model, was_withheld)

    def _set_withheld(self, model: Any, is_withheld: bool) -> None:
        (self._withheld.add if is_withheld else self._withheld.discard)(model)
        model.set_requires_gradient_sync(not is_withheld)

    def clip_grad_norm_(
        self, parameters: list[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        _check_clip_call(parameters)
        return full_tensor(super().clip_grad_norm_(parameters, max_norm, norm_type))

    def clip_grad_value_(self, parameters: list[torch.Tensor], clip_value: float) -> None:
        require_sharded(parameters, "clip_grad_value_")
        super().clip_grad_value_(parameters, clip_value)

    def total_norm(self, parameters: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        _check_clip_call(parameters)
        return full_tensor(super().total_norm(parameters, norm_type))

    @contextmanager
    def unsharded(self, model: torch.nn.Module) -> Iterator[None]:
        units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        hooks = [unit.register_state_dict_pre_hook(_refuse_state_dict) for unit in units]
        for unit in units:
            unit.unshard()
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for unit in units:
                unit.reshard()

    def state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        if not any(isinstance(module, FSDPModule) for module in model.modules()):
            return super().state_dict(model)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(model, options=options)

    def weights_to_save(self, model: torch.nn.Module) -> dict[str, Any]:
        every = dict(model.named_parameters(remove_duplicate=False))
        tied = every.keys() - dict(model.named_parameters()).keys()
        return {name: value for name, value in model.state_dict().items() if name not in tied}

    def empty_init(self) -> AbstractContextManager[Any]:
        return parameters_without_data()


class HSDP(FSDP):
    """Shards models within groups of `shard_size` adjacent ranks; each group holds one replica."""

    name = "hsdp"

    def set_up(self, world: World, settings: StrategySettings) -> None:
        super().set_up(world, settings)
        size = _checked_shard_size(world, settings.shard_size)
        self._mesh = world.mesh(replicas=self.data_size // size, shards=size)
        watch(*self._mesh.get_all_groups())

    def reduce_over_replicas(self, models: Iterable[torch.nn.Module], is_due: bool) -> None:
        for model in map(uncompiled, models):
            if isinstance(model, FSDPModule):
                model.set_requires_all_reduce(is_due)


def _checked_shard_size(world: World, shard_size: int | None) -> int:
    ranks, size = world.ranks, shard_size or world.ranks.local_world_size
    if ranks.world_size % size or (shard_size is None and size == ranks.world_size):
        raise UsageError(
            f"shard_size is {shard_size}, which does not divide the world size, {ranks.world_size}"
            if shard_size
            else "strategy is 'hsdp' on one machine, but shard_size is not set",
            where="the settings strategy and shard_size",
            fix="use strategy fsdp, or set shard_size, the number of ranks per replica of the"
            f" model, to a divisor of {ranks.world_size}",
            code=Code.SHARD_SIZE,
        )
    return size


def _require_shardable(model: torch.nn.Module) -> None:
    """Raise UsageError for empty parameters, and for hooks, which would not run on shards."""
    for name, parameter in model.named_parameters():
        hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        if hooks or parameter.numel() == 0:
            why, fix = "has a hook", "change its gradient after backward() instead"
            if not hooks:
                why, fix = "is empty", "remove it from the model"
            raise UsageError(
                f"the parameter {name} of {type(model).__name__} {why} and cannot be sharded",
                where=PREPARE,
                fix=f"{fix}, or use strategy ddp",
                code=Code.SHARDING,
            )


def _require_one_dtype(units: Iterable[torch.nn.Module]) -> None:
    """Raise UsageError unless all trained weights of each unit have the same dtype."""
    seen: set[torch.nn.Module] = set()
    for unit in units:
        own = {*unit.modules()} - seen
        seen |= own
        tensors = [p.tensor for p in parameters_of(own)]
        dtypes = {str(tensor.dtype) for tensor in tensors if tensor.requires_grad}
        if len(dtypes) > 1:
            raise UsageError(
                f"{type(unit).__name__} has parameters with dtypes"
                f" {' and '.join(sorted(dtypes))}, which cannot be sharded together in one unit",
                where=PREPARE,
                fix="convert the model to a single dtype (mixed_precision sets the dtype of the"
                " computation), choose units of a single dtype with wrap, or use strategy ddp",
                code=Code.SHARDING,
            )


def _unsharded_modules(unit: torch.nn.Module) -> list[torch.nn.Module]:
    inner = [module for module in unit.modules() if isinstance(module, FSDPModule)]
    sharded = {module for unit in inner for module in unit.modules()}
    return [module for module in unit.modules() if module not in sharded]


def _allocate_buffers(units: list[Any], *_: Any) -> None:
    """If the first pass runs in inference_mode(), allocate FSDP's buffers outside this mode."""
    if units and torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            while units:
                unit = units.pop()
                unit.unshard()
                unit.reshard()


def _broadcast_buffers(names: Sequence[tuple[torch.nn.Module, str]], *_: Any) -> None:
    """Copy rank 0's buffers to all ranks before a forward pass, as DDP does."""
    for module, name in names:
        dist.broadcast(getattr(module, name), src=0)


def _name_of(sharded: torch.nn.Module) -> str:
    return type(sharded).__mro__[2].__name__  # FSDPBlock, FSDPModule, Block


def _refuse_copy(model: torch.nn.Module, _: Any) -> NoReturn:
    raise UsageError(
        f"copy.deepcopy() does not support {_name_of(model)}, which is sharded over the ranks",
        where="the script's deepcopy(...) or AveragedModel(...) after prepare()",
        fix="copy the model before prepare(); for an average of its weights, keep"
        " [p.detach().clone() for p in model.parameters()]",
        code=Code.SHARDING,
    )


def _refuse_state_dict(*_: Any) -> NoReturn:
    raise UsageError(
        "state_dict() of a sharded model was called inside accelerator.unsharded(...)",
        where="the script's state_dict()",
        fix="call accelerator.get_state_dict(model) on every rank, outside unsharded()",
        code=Code.SHARDING,
    )


def _check_clip_call(parameters: list[torch.Tensor]) -> None:
    require_sharded(parameters, "clip_grad_norm_")
    if not runs_ahead(parameters):
        call_barrier("clip_grad_norm_(...)")


def _call_gathered(
    model: Any, units: list[Any], method: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a method, and keep the model's weights gathered until the method returns.

    torch's own wrapper frees them after each inner `forward()`, but the method still needs them.
    """
    _allocate_buffers(units)
    model.set_reshard_after_forward(False, recurse=False)
    try:
        return method(*args, **kwargs)
    finally:
        model.set_reshard_after_forward(True, recurse=False)
        model.reshard()


def _gathered_item(_: object, args: tuple[object, ...], __: object) -> Any:
    """Return the value of a single-element DTensor; if it is sharded, gather it from all ranks."""
    tensor: Any = args[0]
    if all(placement.is_replicate() for placement in tensor.placements):
        return tensor.to_local().item()
    call_barrier("item() or float() of a sharded tensor")
    return tensor.full_tensor().item()


# torch returns the value of the local shard; its handler table has no public name
_OP_HANDLERS: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
_OP_HANDLERS[torch.ops.aten._local_scalar_dense.default] = _gathered_item

_SUCCESSOR = "_headway_successor"  # of a parameter: its replacement in the prepared model


def record_successor(old: torch.Tensor, new: torch.Tensor) -> None:
    """Record that `new` replaces `old`, and free the memory of `old`."""
    if old is new or hasattr(old, _SUCCESSOR):
        return  # a tied parameter, already replaced
    new.__dict__.update(old.__dict__)
    new.register_hook = _refuse_hook  # type: ignore[method-assign]
    setattr(old, _SUCCESSOR, new)
    old.grad = None
    old.data = old.data.new_empty(0)
    if old.requires_grad:
        old.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]


def _refuse_hook(_: object) -> NoReturn:
    raise UsageError(
        "a hook of a sharded parameter would not run",
        where="the script's register_hook(...)",
        fix="change the gradient after backward() instead, or use strategy ddp",
        code=Code.SHARDING,
    )


def _refuse_gradient(_: torch.Tensor) -> NoReturn:
    raise UsageError(
        "the loss depends on parameters that prepare() has replaced with sharded parameters",
        where="the script's backward(...)",
        fix="compute it from model.parameters() of the prepared model: parameter.full_tensor()",
        code=Code.CHANGED_LATE,
    )


_UNSUPPORTED = {  # optimizers that do not support shards
    "Adafactor": "needs full rows and columns of parameters",  # torch's and others'
    "Rprop": "uses masked assignment, which torch does not support for shards",
}


def replace_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Replace an optimizer's parameters with their successors, and move its state to them."""
    kind = type(optimizer).__name__
    if kind in _UNSUPPORTED:
        raise UsageError(
            f"{kind} cannot train a sharded model: it {_UNSUPPORTED[kind]}",
            where="the script's prepare(...)",
            fix="use AdamW, or another element-wise optimizer",
            code=Code.SHARDING,
        )
    for group in optimizer.param_groups:
        for old in group["params"]:
            if not isinstance(getattr(old, _SUCCESSOR, old), DTensor):
                raise UsageError(
                    f"{kind} has a parameter of shape {list(old.shape)} that no model had when it"
                    " was prepared, so optimizer steps would not train it",
                    where="the script's prepare(...)",
                    fix="add all layers, then prepare() the model, before or with its optimizer",
                    code=Code.CHANGED_LATE,
                )
    for group in optimizer.param_groups:
        # in place: LBFGS and others keep the list
        group["params"][:] = [_successor_with_state(p, optimizer.state) for p in group["params"]]


def _successor_with_state(old: torch.Tensor, state: Any) -> torch.Tensor:
    new: torch.Tensor | None = getattr(old, _SUCCESSOR, None)
    if new is None:
        return old
    if old in state:
        state[new] = {name: sharded_as(new, value) for name, value in state.pop(old).items()}
    return new


def sharded_as(parameter: torch.Tensor, value: Any) -> Any:
    """If `value` is an unsharded tensor of the same shape, return it sharded like `parameter`.

    Every rank slices its own `value`, without communication. Other values are returned unchanged.
    """
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor) or value.shape != parameter.shape:
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)


def require_sharded(parameters: list[torch.Tensor], method: str) -> None:
    """Raise UsageError unless all `parameters` belong to prepared models."""
    where = f"the script's {method}(...)"
    if any(hasattr(tensor, _SUCCESSOR) for tensor in parameters):
        raise UsageError(
            f"{method}() got parameters that prepare() has replaced with sharded parameters",
            where=where,
            fix=f"pass the prepared model's parameters: {method}(model.parameters(), ...)",
            code=Code.CHANGED_LATE,
        )
    if len({isinstance(tensor, DTensor) for tensor in parameters}) > 1:
        raise UsageError(
            f"{method}() got sharded parameters together with parameters of a model that is not"
            " prepared; torch cannot clip both at once",
            where=where,
            fix=f"prepare that model too, or call {method}() separately for each model",
            code=Code.CHANGED_LATE,
        )
