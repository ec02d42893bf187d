"""Training steps: micro-batches, backward passes and gradient clipping."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any, Literal

import torch
from torch.distributed.algorithms.join import Join

from headway.distributed.call_barrier import call_barrier, runs_ahead
from headway.distributed.collectives import reduce
from headway.distributed.handler import check_entries, check_range
from headway.errors import Code, UsageError
from headway.ipc.progress import Progress
from headway.ipc.step_clock import BACKWARD, GRADIENTS
from headway.strategies.ddp import time_exchange
from headway.strategies.strategy import NULL_CTX
from headway.training.accumulation import MicroBatch
from headway.training.arguments import reject_unsupported
from headway.training.optimizer import PreparedOptimizer, note_discarded
from headway.training.replicas import note_not_stepped, note_raw_optimizer, note_unprepared
from headway.training.training import Training

Tensors = torch.Tensor | Iterable[torch.Tensor]
_FEW_PASSES = 100  # after which a step is expected


class Steps:
    """The micro-batches, backward passes and gradients of a training run; see `Accelerator`."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.is_triggered = False  # whether this rank has called `set_trigger()`

    def backward(
        self, loss: torch.Tensor, num_tokens: int | torch.Tensor | None, kwargs: dict[str, Any]
    ) -> None:
        """Accumulate the gradients of `loss` / gradient_accumulation_steps."""
        training = self.training
        accumulation, progress = training.accumulation, training.progress
        is_last = accumulation.sync_gradients or accumulation.plugin.sync_each_batch
        if num_tokens is not None or accumulation.steps > 1:
            kwargs["gradient"] = self._weight(loss, num_tokens, kwargs.get("gradient"))
            if (strategy := training.strategy).shards:
                strategy.reduce_over_replicas(training.models, is_last or num_tokens is not None)
        is_watched = progress.is_watched
        handle = None
        if is_watched:
            clock = progress.clock
            clock.enter(BACKWARD)
            if clock.splits_backward and not is_last:
                clock.phase = GRADIENTS
            elif clock.splits_backward and loss.requires_grad:
                handle = time_exchange(loss, clock)
        try:
            training.precision.backward(loss, **kwargs)
        finally:
            accumulation.num_backward += 1
            if accumulation.steps > 1:
                accumulation.watch_gradients(self._parameters)
            progress.num_trained += 1
            if progress.num_trained == 1:
                note_unprepared(training)
                note_raw_optimizer(training)
            elif accumulation.num_backward == _FEW_PASSES * accumulation.steps:
                note_not_stepped(training)
            if is_watched:
                progress.end_backward()
                if handle is not None:
                    handle.remove()
        if is_watched and progress.clock.mark >= progress.clock.due_at:
            _note_loss(progress, loss, num_tokens)

    def _weight(
        self,
        loss: torch.Tensor,
        num_tokens: int | torch.Tensor | None,
        gradient: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Return the initial gradient for the backward pass of `loss`; None means 1.

        The loss is a sum over `num_tokens` tokens, or a mean if `num_tokens` is None.
        `gradient` is the argument that the script passed.
        """
        accumulation = self.training.accumulation
        if accumulation.steps > 1:
            has_lost = accumulation.begin_backward(by_tokens=num_tokens is not None)
            if has_lost and self.training.optimizers:
                note_discarded(self.training.progress, "a prepared model")
        if num_tokens is not None:
            if gradient is not None:
                raise UsageError(
                    "backward() got both num_tokens and gradient",
                    where="the script's backward(loss, num_tokens=..., gradient=...)",
                    fix="multiply the loss by the gradient, and pass num_tokens alone",
                    code=Code.CONTRADICTION,
                )
            shards = self.training.strategy.shards
            if shards and not runs_ahead([loss]):
                call_barrier("backward(num_tokens=...)")
            return accumulation.start_of_backward(
                loss,
                num_tokens,
                self._parameters,
                is_synced=shards or accumulation.plugin.sync_each_batch,
            )
        if gradient is not None:
            return gradient / accumulation.steps
        if loss.numel() != 1:  # backward() will fail
            return None
        # bitwise equal to loss / steps; a new tensor, because backward functions may modify it
        return torch.full_like(loss, 1 / accumulation.steps, requires_grad=False)

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return the parameters of the models that are accumulated together."""
        is_apart = self.training.accumulation.is_apart
        models = (model for at, model in enumerate(self.training.models) if not is_apart(at))
        return chain.from_iterable(model.parameters() for model in models)

    def accumulate(self, models: tuple[torch.nn.Module, ...]) -> AbstractContextManager[Any]:
        accumulation = self.training.accumulation
        accumulation.begin_micro_batch(models, lambda: self.training.models)
        strategy = self.training.strategy
        is_synced = accumulation.sync_gradients or accumulation.plugin.sync_each_batch
        if is_synced or strategy.shards:  # sharded gradients need less memory than unsharded ones
            return MicroBatch(accumulation, NULL_CTX)
        stack = ExitStack()
        for model in models or self.training.models:
            stack.enter_context(strategy.no_sync(model))
        return MicroBatch(accumulation, stack)

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None, *, usual: bool
    ) -> Iterator[None]:
        training = self.training
        if training.strategy.shards:
            raise UsageError(
                "join_uneven_inputs() does not support sharded models",
                where="the script's join_uneven_inputs()",
                fix="use strategy ddp, or remove join_uneven_inputs()",
                code=Code.SHARDING,
            )
        even = usual if even_batches is None else even_batches
        with ExitStack() as stack:
            if even_batches is not None:
                for loader in training.all_loaders:
                    stack.enter_context(loader.override_even_batches(even))
            if training.world.ranks.world_size > 1:
                join = Join(list(joinables), enable=not even, throw_on_early_termination=False)
                stack.enter_context(join)
            training.ranks_may_differ = not even
            stack.callback(setattr, training, "ranks_may_differ", False)
            yield

    def check_trigger(self) -> bool:
        is_triggered = torch.tensor(int(self.is_triggered), device=self.training.world.device)
        self.is_triggered = False
        return bool(reduce(is_triggered, "sum").item())

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None
    ) -> None:
        if optimizer is None:
            optimizer = self.training.optimizers
        given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        check_entries("optimizer", given, torch.optim.Optimizer, "Accelerator.unscale_gradients")
        inner = [opt.optimizer if isinstance(opt, PreparedOptimizer) else opt for opt in given]
        groups = chain.from_iterable(opt.param_groups for opt in inner)
        parameters = chain.from_iterable(group["params"] for group in groups)
        self.training.precision.unscale(inner, parameters)

    def clip_grad_norm_(
        self, parameters: Tensors, max_norm: float, norm_type: float | Literal["inf"] = 2
    ) -> torch.Tensor:
        check_range("clip_grad_norm_", 0, max_norm=max_norm)
        strategy, norm_type = self.training.strategy, float(norm_type)
        if self.training.accumulation.sync_gradients:
            return strategy.clip_grad_norm_(self.unscaled(parameters), max_norm, norm_type)
        norm = strategy.total_norm(_as_list(parameters), norm_type)
        return norm / self.training.precision.loss_scale()

    def clip_grad_value_(self, parameters: Tensors, clip_value: float) -> None:
        check_range("clip_grad_value_", 0, clip_value=clip_value)
        if self.training.accumulation.sync_gradients:
            self.training.strategy.clip_grad_value_(self.unscaled(parameters), clip_value)

    def unscaled(self, parameters: Tensors) -> list[torch.Tensor]:
        """Return the parameters as a list; with fp16, unscale their gradients first."""
        tensors = _as_list(parameters)
        self.training.precision.unscale(
            [optimizer.optimizer for optimizer in self.training.optimizers], tensors
        )
        return tensors


def check_backward(loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
    where = "the script's backward(...)"
    known = signature(torch.Tensor.backward).parameters
    reject_unsupported({name: kwargs[name] for name in kwargs.keys() - known}, known, where)
    for name, kind in (("gradient", torch.Tensor), ("retain_graph", bool), ("create_graph", bool)):
        if kwargs.get(name) is not None:
            check_entries(name, [kwargs[name]], kind, "Accelerator.backward")
    if not loss.requires_grad:
        raise UsageError(
            "the loss does not require grad, because none of its inputs does",
            where=where,
            fix="compute it with the model's forward(), outside of torch.no_grad(), without .item()"
            " or .detach(), and not from the result of gather(), which has no gradients:"
            " use torch.distributed.nn.functional.all_gather; some weights of the model must have"
            " requires_grad=True",
            code=Code.LOSS,
        )
    if loss.numel() != 1 and kwargs.get("gradient") is None:
        raise UsageError(
            f"the loss must have a single element, but has shape {[*loss.shape]}",
            where=where,
            fix="pass its mean",
            code=Code.LOSS,
        )


def _note_loss(
    progress: Progress, loss: torch.Tensor, num_tokens: int | torch.Tensor | None
) -> None:
    """Record a loss for the launcher, without synchronizing with the GPU.

    Skip losses that are not real numbers, cannot be copied, or are on a GPU that is not timed.
    """
    if loss.numel() != 1 or isinstance(num_tokens, torch.Tensor):
        return
    count, clock = num_tokens or 1, progress.clock
    if loss.device.type == "cpu":
        _keep_loss(progress, loss.detach(), count)
    elif clock.queue is not None and loss.device == clock.device:
        with suppress(RuntimeError):  # no pinned memory, or a device error
            clock.queue.when_done(  # then the copy is valid
                lambda: partial(
                    _keep_loss, progress, loss.detach().to("cpu", non_blocking=True), count
                )
            )


def _keep_loss(progress: Progress, loss: torch.Tensor, count: int) -> None:
    with suppress(RuntimeError):
        progress.loss = float(loss) / count


def _as_list(tensors: Tensors) -> list[torch.Tensor]:
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if not given and isinstance(tensors, Iterator):
        raise UsageError(
            "the iterator of parameters is empty or exhausted, so nothing would be clipped",
            where="the script's clip_grad_norm_(...) or clip_grad_value_(...)",
            fix="pass model.parameters() in each step, or a list: params = [*model.parameters()]",
            code=Code.BAD_ARGUMENT,
        )
    check_entries("parameters", given, torch.Tensor, "Accelerator.clip_grad_norm_")
    return given
