"""DistributedDataParallel: every rank has a replica of the model and its own part of each batch.

The time between the last gradient and the end of a backward pass is the time that a rank waits for
the gradient all-reduce; see `time_exchange`. With sharded models, waiting counts as part of the
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.utils import _sync_module_states  # no public name
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from headway.distributed.call_barrier import call_barrier, has_real_ranks
from headway.distributed.nested import is_instance_of
from headway.distributed.world import World
from headway.errors import Code, UsageError
from headway.ipc.progress import Progress, process_progress
from headway.ipc.step_clock import FORWARD, SYNC, StepClock
from headway.strategies.compilation import uncompiled
from headway.strategies.strategy import NULL_CTX, ForwardMethods, Strategy, StrategySettings
from headway.strategies.weights import ModelWeights

_COPIED_AT_ONCE = 256 * 2**20  # bytes
PASSES, _MAX_PASSES = "_headway_passes", 100


class DDP(Strategy):
    """Replicates the model, and averages gradients over the ranks during the backward pass.

    When a model is prepared, rank 0's weights are broadcast to the other ranks.
    """

    name = "ddp"

    def set_up(self, world: World, settings: StrategySettings) -> None:
        super().set_up(world, settings)
        self.data_rank, self.data_size = world.ranks.rank, world.ranks.world_size
        self.compares_ranks = settings.ddp.compare_weights

    def _share(self, model: torch.nn.Module) -> torch.nn.Module:
        inner = uncompiled(model)
        is_sharded = is_instance_of(inner, "torch.distributed.fsdp", "FSDPModule")
        if isinstance(inner, DistributedDataParallel) or is_sharded:
            return model
        call_barrier("prepare(...)")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            self._copy_from_rank_0(model)
            return model
        gpu = self._world.device.index
        shared = DistributedDataParallel(
            model,
            device_ids=None if gpu is None else [gpu],
            **self._settings.ddp.to_kwargs(),
        )
        if torch.are_deterministic_algorithms_enabled():
            _fix_buckets(shared)
        self._settings.ddp.register_comm_hook(shared)
        _watch_frozen(shared)
        names = [method for method in self._settings.forward_methods if hasattr(inner, method)]
        if names:
            methods = ForwardMethods(inner)
            for name in names:
                plain = getattr(inner, name)
                methods.register(name, plain, partial(_in_forward, shared, inner, plain))
        progress = process_progress()
        _record_passes(shared, progress)
        if progress.is_watched:
            progress.clock.split_at = 0.0
            if self._settings.ddp.broadcast_buffers and not self._settings.dynamo.compiles:
                time_buffers(shared, progress.clock)
        return shared

    def _copy_from_rank_0(self, model: torch.nn.Module) -> None:
        """Broadcast rank 0's weights, as DDP does for models that are trained."""
        if not has_real_ranks():
            return
        ModelWeights(model, self._world.device)  # raises if the models differ
        group: Any = dist.group.WORLD
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        _sync_module_states(
            model, group, _COPIED_AT_ONCE, src=0, params_and_buffers_to_ignore=ignored
        )

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        if not isinstance(model, DistributedDataParallel):  # skips unwrapping in the common case
            model = uncompiled(model)
        return model.no_sync() if isinstance(model, DistributedDataParallel) else NULL_CTX

    @contextmanager
    def sync_in_backward(self, model: torch.nn.Module) -> Iterator[None]:
        model = uncompiled(model)
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        was_synced = model.require_backward_grad_sync
        # as after a forward pass outside `no_sync`; relies on an undocumented name, `reducer`
        model.require_backward_grad_sync = True
        model.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            model.require_backward_grad_sync = was_synced

    def broadcasts_buffers(self, model: torch.nn.Module) -> bool:
        """Return whether rank 0's buffers are broadcast before the next forward pass of `model`.

        DDP skips this broadcast after a forward pass without gradients or under `no_sync`.
        """
        model = uncompiled(model)
        if not isinstance(model, DistributedDataParallel):
            return False
        return bool(model.broadcast_buffers and model.require_forward_param_sync)

    def set_broadcast_buffers(self, model: torch.nn.Module, value: bool) -> None:
        model = uncompiled(model)
        if isinstance(model, DistributedDataParallel):
            model.require_forward_param_sync = value


def _in_forward(
    shared: DistributedDataParallel,
    inner: torch.nn.Module,
    method: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a method in place of `forward()`, so that DDP synchronizes the gradients."""
    own = vars(inner).get("forward")

    def restore() -> None:
        vars(inner).pop("forward", None)
        if own is not None:
            vars(inner)["forward"] = own

    def instead(*args: Any, **kwargs: Any) -> Any:
        restore()
        return method(*args, **kwargs)

    vars(inner)["forward"] = instead
    try:
        return shared(*args, **kwargs)
    finally:
        restore()


def _fix_buckets(model: DistributedDataParallel) -> None:
    """Keep DDP's gradient buckets the same in every step, even after a restart.

    After a process's first step, DDP sorts the buckets by the time at which gradients became ready.
    With three or more ranks, a gradient's position in its bucket determines the order of summation.
    A backward pass with zero gradients makes all gradients ready in DDP's initial order, so that
    DDP keeps this order in its first forward pass.

    Relies on undocumented names in torch: `reducer`, `prepare_for_backward`, and parameters'
    `_post_accumulate_grad_hooks`. Models with such hooks, which must not see zeros, are skipped.
    """
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    is_sparse = any(getattr(module, "sparse", False) for module in model.module.modules())
    has_hooks = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
    if model.find_unused_parameters or model.static_graph or is_sparse or has_hooks:
        return
    before = [p.grad for p in parameters]
    model.reducer.prepare_for_backward([])
    for parameter in reversed(parameters):
        parameter.grad = None
        torch.autograd.backward(parameter, torch.zeros_like(parameter))
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient


def _watch_frozen(model: DistributedDataParallel) -> None:
    """Make forward passes raise UsageError if a parameter is unfrozen after DDP was created.

    DDP would not average this parameter's gradient, so ranks would train it differently.
    """
    named = model.module.named_parameters()
    if frozen := {name: p for name, p in named if not p.requires_grad}:
        model.register_forward_pre_hook(partial(_require_frozen, frozen))


def _require_frozen(frozen: dict[str, torch.nn.Parameter], *_: Any) -> None:
    trained = next((name for name, p in frozen.items() if p.requires_grad), None)
    if trained is not None and torch.is_grad_enabled():
        raise UsageError(
            f"{trained} was frozen when its model was prepared but now requires grad, so"
            " DistributedDataParallel would not average its gradients over the ranks",
            where="the script's requires_grad_(True) after prepare(...)",
            fix="freeze it only after prepare(), and pass DistributedDataParallelKwargs("
            "find_unused_parameters=True); or use strategy fsdp",
            code=Code.CHANGED_LATE,
        )


def _record_passes(model: DistributedDataParallel, progress: Progress) -> None:
    """Record in PASSES the number of backward passes before each of the first forward passes."""

    def record(*_: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            passes.append(progress.num_trained)
            if len(passes) == _MAX_PASSES:
                handle.remove()

    vars(model)[PASSES] = passes = list[int]()
    handle = model.register_forward_pre_hook(record)


# ------------------------------------------------------------------ waiting for other ranks


def time_exchange(loss: torch.Tensor, clock: StepClock) -> RemovableHandle:
    """Measure how long the next backward pass of `loss` waits for other ranks.

    The autograd engine runs queued callbacks after the last gradient, in the order in which they
    were queued. The first gradient queues this one, so it precedes DDP's, which waits for the
    all-reduce. On a GPU, all kernels are then queued, and the clock records a device event.

    Relies on an undocumented name in torch: `Variable._execution_engine`.
    """
    queue = Variable._execution_engine.queue_callback
    handle: RemovableHandle = loss.register_hook(  # type: ignore[no-untyped-call]
        lambda _: queue(clock.begin_exchange)
    )
    return handle


def time_buffers(model: DistributedDataParallel, clock: StepClock) -> None:
    """Measure how long forward passes wait for rank 0's buffers before computing."""

    def begin(*_: Any) -> None:
        if clock.phase == FORWARD:
            clock.enter(SYNC)

    def end(*_: Any) -> None:
        if clock.phase == SYNC:
            clock.enter(FORWARD)

    if any(True for _ in model.module.buffers()):
        model.register_forward_pre_hook(begin)
        model.module.register_forward_pre_hook(end)
