"""DistributedDataParallel: every rank has a copy of the model and its own share of each batch.

How long a rank only waits for the exchange of gradients, from its last gradient to the end of the
pass, is noted by hooks of torch's public `register_post_accumulate_grad_hook`: at first on all
parameters, and after some steps on those alone that came last in one of them. Of short steps one in
some milliseconds is watched, and stands for those before it. All ranks must compute the same graph
in each pass. Where parameters may be unused, and where ranks share a model, waiting counts as the
backward pass. On a GPU the hooks run when a gradient is queued; the clock then has an event of the
device there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.utils import _sync_module_states  # no public name
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from headway.distributed.meeting import has_real_ranks, meet
from headway.distributed.world import World
from headway.errors import UsageError
from headway.ipc.progress import Progress
from headway.ipc.step_clock import FORWARD, SYNC, StepClock
from headway.strategies.compilation import uncompiled
from headway.strategies.strategy import NOTHING, ForwardMethods, Strategy, StrategySettings
from headway.strategies.weights import ModelWeights

_COPIED_AT_ONCE = 256 * 2**20  # bytes
_WATCHED_EVERY_S = 0.005  # where steps are shorter
_NUM_STEPS = 3  # in which all parameters are looked at; DDP orders its buckets after the first


class DDP(Strategy):
    """Gradients are averaged over the ranks during the backward pass.

    Rank 0's weights are copied to the others at the start.
    """

    name = "ddp"

    def set_up(self, world: World, settings: StrategySettings) -> None:
        super().set_up(world, settings)
        self.data_rank = world.mesh.get_local_rank("data")
        self.data_size = world.mesh.size()
        self.has_copies = settings.ddp.compare_weights

    def _share(self, model: torch.nn.Module) -> torch.nn.Module:
        has_gradients = any(parameter.requires_grad for parameter in model.parameters())
        if isinstance(uncompiled(model), DistributedDataParallel) or _exchanges_itself(model):
            return model
        meet("prepare(...)")
        if not has_gradients:
            self._copy_from_rank_0(model)
            return model
        gpu = self._world.device.index
        shared = DistributedDataParallel(
            model,
            device_ids=None if gpu is None else [gpu],
            process_group=self._world.mesh.get_group("data"),
            **self._settings.ddp.to_kwargs(),
        )
        if torch.are_deterministic_algorithms_enabled():
            _fix_buckets(shared)
        self._settings.ddp.register_comm_hook(shared)
        _watch_frozen(shared)
        inner = uncompiled(model)
        names = [method for method in self._settings.forward_methods if hasattr(inner, method)]
        if names:
            methods = ForwardMethods(inner)
            for name in names:
                plain = getattr(inner, name)
                methods.register(name, plain, partial(_in_forward, shared, inner, plain))
        progress = self._settings.progress
        if progress is not None and progress.is_watched:
            self._watch_waiting(shared, progress)
        return shared

    def _copy_from_rank_0(self, model: torch.nn.Module) -> None:
        """Give all ranks rank 0's weights, as DDP does for models that are trained."""
        if not has_real_ranks():
            return
        ModelWeights(model, self._world.device)  # refuses models that are not the same
        group = self._world.mesh.get_group("data")
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        _sync_module_states(
            model, group, _COPIED_AT_ONCE, src=0, params_and_buffers_to_ignore=ignored
        )

    def _watch_waiting(self, shared: DistributedDataParallel, progress: Progress) -> None:
        if not self._settings.ddp.find_unused_parameters:
            note_exchange(shared, progress)
        if self._settings.ddp.broadcast_buffers and not self._settings.dynamo.compiles:
            note_buffers(shared, progress.clock)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        if not isinstance(model, DistributedDataParallel):  # the usual case needs no search
            model = uncompiled(model)
        return model.no_sync() if isinstance(model, DistributedDataParallel) else NOTHING

    @contextmanager
    def sync_in_backward(self, model: torch.nn.Module) -> Iterator[None]:
        model = uncompiled(model)
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        was_synced = model.require_backward_grad_sync
        _prepare_exchange(model)
        try:
            yield
        finally:
            model.require_backward_grad_sync = was_synced

    def broadcasts_buffers(self, model: torch.nn.Module) -> bool:
        """Return whether all ranks get rank 0's buffers before they compute with `model` again.

        DDP does not broadcast them after a forward pass without gradients or under `no_sync`.
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
    """Call a method in the place of `forward()`, so that DDP exchanges the gradients."""
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


def _prepare_exchange(model: DistributedDataParallel) -> None:
    """Make the next backward pass exchange gradients, as after a forward pass outside `no_sync`.

    Relies on undocumented names of torch: `reducer`, with `prepare_for_backward`.
    """
    model.require_backward_grad_sync = True
    model.reducer.prepare_for_backward([])


def _fix_buckets(model: DistributedDataParallel) -> None:
    """Keep the buckets of gradients the same in every step, also after a restart.

    DDP reorders them after a process's first step, as gradients become ready, and a gradient's
    place in its bucket decides in which order three or more ranks are summed up. A pass with zero
    gradients makes them ready in DDP's initial order; its first forward pass then fixes them.

    Relies on undocumented names of torch: `reducer`, with `prepare_for_backward`, and
    parameters' `_post_accumulate_grad_hooks`, which must not see zeros.
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
    """Make forward passes refuse parameters that DDP skips, as they were frozen at its start.

    Each rank would train them with its own gradients.
    """
    named = model.module.named_parameters()
    if frozen := {name: p for name, p in named if not p.requires_grad}:
        model.register_forward_pre_hook(partial(_require_frozen, frozen))


def _require_frozen(frozen: dict[str, torch.nn.Parameter], *_: Any) -> None:
    trained = next((name for name, p in frozen.items() if p.requires_grad), None)
    if trained is not None and torch.is_grad_enabled():
        raise UsageError(
            f"{trained} was frozen when its model was prepared, and requires gradients now, which"
            " DistributedDataParallel would not average over the ranks",
            where="the script's requires_grad_(True) after prepare(...)",
            fix="freeze it after prepare(), with DistributedDataParallelKwargs("
            "find_unused_parameters=True), or use strategy fsdp",
        )


def _exchanges_itself(model: torch.nn.Module) -> bool:
    module = sys.modules.get("torch.distributed.fsdp")  # slow to import; it is where this was used
    return module is not None and isinstance(uncompiled(model), module.FSDPModule)


# ------------------------------------------------------------------ waiting for the exchange


def note_exchange(model: DistributedDataParallel, progress: Progress) -> None:
    """Count the time that a model's backward passes wait for other ranks.

    Each parameter that requires a gradient must get one in every pass.
    """
    _LastGradient(model, progress)


def note_buffers(model: DistributedDataParallel, clock: StepClock) -> None:
    """Count the time that a forward pass waits for rank 0's buffers before it computes."""

    def begin(*_: Any) -> None:
        if clock.phase == FORWARD:
            clock.enter(SYNC)

    def end(*_: Any) -> None:
        if clock.phase == SYNC:
            clock.enter(FORWARD)

    if any(True for _ in model.module.buffers()):
        model.register_forward_pre_hook(begin)
        model.module.register_forward_pre_hook(end)


class _LastGradient:
    """Finds which parameters' gradients come last, and watches these in some of the steps."""

    def __init__(self, model: DistributedDataParallel, progress: Progress) -> None:
        self._trained = [p for p in model.module.parameters() if p.requires_grad]
        self._progress = progress
        self._hooks: dict[int, RemovableHandle] = {}
        self._last: int | None = None  # the parameter whose gradient came last in this step
        self._lasts: list[int] = []  # of the first steps
        self._watch(range(len(self._trained)))
        progress.call_after_steps(model, self._end_step)

    def _watch(self, numbers: Iterable[int]) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks = {
            number: self._trained[number].register_post_accumulate_grad_hook(
                partial(self._on_gradient, number)
            )
            for number in numbers
        }
        self._since = self._progress.clock.mark

    def _on_gradient(self, number: int, _: torch.Tensor) -> None:
        self._progress.clock.begin_exchange()
        self._progress.call_at = 0.0
        self._last = number

    def _end_step(self) -> float:
        """Return the time on the clock after which the end of a step is to be noted again."""
        mark = self._progress.clock.mark
        last, self._last = self._last, None
        if last is None:
            if not self._hooks and mark > self._since + _WATCHED_EVERY_S:
                self._watch({*self._lasts})
        elif len(self._lasts) < _NUM_STEPS:
            self._lasts.append(last)
        else:
            is_short = mark - self._since < _WATCHED_EVERY_S
            wanted = set() if is_short else {*self._lasts}
            if wanted != self._hooks.keys():
                self._watch(wanted)
            self._since = mark
        return float("inf") if self._hooks else self._since + _WATCHED_EVERY_S
