"""The steps of a training: micro-batches, backward passes, clipped gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch.distributed.algorithms.join import Join

from headway.contract.records import beat, channel
from headway.data.loader import PreparedDataLoader
from headway.micro_batches import MicroBatches
from headway.optimizer import PreparedOptimizer
from headway.plugins.handlers import AutocastKwargs
from headway.preparing import Preparing
from headway.token_mean import refuse_gradient

Tensors = torch.Tensor | Iterable[torch.Tensor]


class Stepping(Preparing):
    """A rank that trains the models that it has prepared."""

    _is_triggered = False
    _micro_batches: MicroBatches | None = None  # with auto_micro_batch

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are due: optimizers step, and ranks exchange gradients."""
        return self._accumulation.sync_gradients

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer skipped its last step, because fp16 gradients overflowed."""
        return any(one.step_was_skipped for one in self._all(PreparedOptimizer))

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any]:
        """Return the context in which operations outside a prepared model use the precision.

        Args:
            autocast_handler: in place of the Accelerator's; `AutocastKwargs(enabled=False)` goes
                back to fp32.

        Examples:
            >>> accelerator = Accelerator(cpu=True, mixed_precision="bf16")
            >>> with accelerator.autocast():
            ...     product = torch.ones(2, 3) @ torch.ones(3, 4)
            >>> product.dtype
            torch.bfloat16
        """
        return self._precision.autocast(autocast_handler)

    def backward(
        self, loss: torch.Tensor, *, num_tokens: int | torch.Tensor | None = None, **kwargs: Any
    ) -> None:
        """Add the gradients of `loss` / gradient_accumulation_steps; `kwargs` go to backward().

        Args:
            loss: a mean over the micro-batch; with `num_tokens` the sum over its tokens.
            num_tokens: how many tokens of this rank `loss` is the sum of, 0 or more. The gradients
                of an optimizer step are then those of the mean over all tokens of all its
                micro-batches and ranks, as of one large batch. While gradients accumulate, all
                micro-batches of the step need it, each in its only backward pass.

        Raises:
            UsageError: `num_tokens` with a loss of several elements, with a `gradient`, under
                `no_sync()` of a sharded model, or, while gradients accumulate, for one of several
                backward passes of a micro-batch.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(4))
            >>> accelerator.backward((3 * weight).sum(), num_tokens=4)
            >>> weight.grad
            tensor([0.7500, 0.7500, 0.7500, 0.7500])
        """
        split = self._micro_batches
        if split is not None and not split.is_active:
            split = None
        if split is not None:
            loss = split.weighed(loss, by_tokens=num_tokens is not None)
        elif self._accumulation.steps > 1 and self._accumulation.num_steps:
            self._token_mean.refuse_mixture(self._accumulation, num_tokens is not None)
        if num_tokens is not None:
            refuse_gradient(kwargs)
            kwargs["gradient"] = self._start_by_tokens(loss, num_tokens)
        elif self._accumulation.steps > 1:
            given = kwargs.get("gradient")
            if given is not None:
                kwargs["gradient"] = given / self._accumulation.steps
            elif loss.numel() == 1:  # for others torch says that it needs a gradient
                kwargs["gradient"] = self._accumulation.gradient_of(loss)
        channel.phase = "backward"
        if channel.fd is not None:
            beat()
        try:
            self._precision.backward(loss, **kwargs)
        finally:
            channel.phase = "script"
        if split is not None:
            split.after_backward()

    def _start_by_tokens(self, loss: torch.Tensor, num_tokens: int | torch.Tensor) -> torch.Tensor:
        """Return the gradient with which the backward pass of a sum over tokens begins."""
        if self._strategy.shards:
            self._token_mean.refuse_withheld()
        return self._token_mean.start_of_backward(
            loss,
            num_tokens,
            self.sync_gradients,
            self._trained_parameters,
            is_exchanged=self._strategy.shards or self._accumulation.exchanges_each_batch,
        )

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[Any]:
        """Begin a micro-batch: every n-th one and the loader's last one make an optimizer step.

        The last step of an epoch may have fewer than n micro-batches; each still counts 1/n.

        Args:
            models: those trained here; without any, all prepared models.

        Returns:
            The context for the micro-batch's forward and backward pass.

        Examples:
            >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            >>> for _ in range(4):
            ...     with accelerator.accumulate():
            ...         accelerator.sync_gradients
            False
            True
            False
            True
        """
        split = self._micro_batches
        if split is not None and split.is_active:
            return split.guard(self._no_sync(models))
        self._accumulation.begin_micro_batch()
        if self._accumulation.sync_gradients or self._accumulation.exchanges_each_batch:
            return nullcontext()
        return self._no_sync(models)

    def _no_sync(self, models: Sequence[torch.nn.Module]) -> AbstractContextManager[Any]:
        if len(models) == 1:
            return self._strategy.no_sync_in_micro_batch(models[0])
        stack = ExitStack()
        for model in models or self._all(torch.nn.Module):
            stack.enter_context(self._strategy.no_sync_in_micro_batch(model))
        return stack

    def micro_batches(
        self, batch: Any, *, max_size: int | None = None, min_size: int = 1
    ) -> Iterator[Any]:
        """Return the parts of a batch that fit into memory, with `auto_micro_batch=True`.

        Where memory runs out on any rank, all ranks begin the batch again in parts of half the
        size, which stays for all later batches. One batch is one micro-batch of
        `gradient_accumulation_steps`, however many parts it has; each counts by its samples.

        Args:
            batch: tensors of shape [samples, ...], alone or nested.
            max_size: no part has more samples.
            min_size: no smaller size is tried.

        Returns:
            An iterator over the parts; without `auto_micro_batch` over the batch alone.

        Raises:
            OutOfMemory: memory runs out with parts of `min_size` samples, too.
            WrongValue: a size is below 1, or the batch has no samples.

        Examples:
            >>> accelerator = Accelerator(cpu=True, auto_micro_batch=True)
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> for part in accelerator.micro_batches(torch.ones(5, 2), max_size=3):
            ...     with accelerator.accumulate(model):
            ...         accelerator.backward(model(part).mean())
            ...     print(part.shape)
            torch.Size([3, 2])
            torch.Size([2, 2])
        """
        split = self._micro_batches
        return iter((batch,)) if split is None else split.parts(batch, max_size, min_size)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which gradients of `model` stay on their rank.

        Examples:
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> with accelerator.no_sync(model):
            ...     accelerator.backward(model(torch.ones(4, 2)).mean())
        """
        return self._token_mean.within(self._strategy.no_sync(model), withheld=True)

    def _training_alone(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which each rank makes optimizer steps of its own."""
        self._strategy.require_whole_models("LocalSGD")
        return self._token_mean.within(self._strategy.no_sync(model), local=True)

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward pass exchanges gradients in spite of `no_sync`.

        For several forward passes under `no_sync(model)`, the backward pass of the last of which
        exchanges the gradients of all. It does nothing with one rank.

        Examples:
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> with accelerator.no_sync(model):
            ...     first, second = (model(torch.ones(4, 2)).mean() for _ in range(2))
            ...     accelerator.backward(first)
            ...     with accelerator.trigger_sync_in_backward(model):
            ...         accelerator.backward(second)
        """
        return self._token_mean.within(self._strategy.sync_in_backward(model))

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Let ranks that run out of batches take part in the others' exchanges; see torch's Join.

        Args:
            joinables: prepared models, and other `torch.distributed.algorithms.Joinable`.
            even_batches: in the block, in place of the Accelerator's setting; with False each rank
                gets the batches that there are.

        Examples:
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> with accelerator.join_uneven_inputs([model], even_batches=False):
            ...     accelerator.backward(model(torch.ones(3, 2)).mean())
        """
        self._strategy.require_whole_models("join_uneven_inputs()")
        even = self._data.even_batches if even_batches is None else even_batches
        with ExitStack() as stack:
            if even_batches is not None:
                for loader in self._all(PreparedDataLoader):
                    stack.enter_context(loader.sharing_evenly(even))
            if self.use_distributed:
                join = Join(list(joinables), enable=not even, throw_on_early_termination=False)
                stack.enter_context(join)
            yield

    def set_trigger(self) -> None:
        """Let the next `check_trigger()` return True on all ranks; any rank may call this."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Return whether any rank called `set_trigger()` since the last check. All must call it.

        Examples:
            >>> accelerator.set_trigger()
            >>> accelerator.check_trigger(), accelerator.check_trigger()
            (True, False)
        """
        is_triggered = torch.tensor(int(self._is_triggered), device=self.device)
        self._is_triggered = False
        return bool(self.reduce(is_triggered).item())

    def unscale_gradients(
        self,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    ) -> None:
        """Divide gradients by fp16's loss scale, once for each step; else there is nothing to do.

        Args:
            optimizer: whose gradients; None means all that are prepared.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.1))
            >>> accelerator.backward(weight.sum())
            >>> accelerator.unscale_gradients(optimizer)
            >>> weight.grad
            tensor([1., 1.])
        """
        if optimizer is None:
            optimizer = self._all(PreparedOptimizer)
        given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        inner = [one.optimizer if isinstance(one, PreparedOptimizer) else one for one in given]
        groups = chain.from_iterable(one.param_groups for one in inner)
        self._precision.unscale(inner, chain.from_iterable(group["params"] for group in groups))

    def clip_grad_norm_(
        self, parameters: Tensors, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip the gradients' norm, unless gradients accumulate, and return what it was.

        Args:
            parameters: those whose gradients are clipped, of any shapes.
            max_norm: the largest norm of all gradients together.
            norm_type: 2 is the Euclidean norm; `inf` the largest absolute value.

        Returns:
            The norm before, without fp16's loss scale; a tensor of shape [].

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(4))
            >>> accelerator.backward((3 * weight).sum())
            >>> accelerator.clip_grad_norm_([weight], max_norm=1.0)
            tensor(6.)
            >>> weight.grad
            tensor([0.5000, 0.5000, 0.5000, 0.5000])
        """
        if self.sync_gradients:
            return self._strategy.clip_grad_norm_(self._unscaled(parameters), max_norm, norm_type)
        norm = self._strategy.total_norm(_as_list(parameters), norm_type)
        return norm / self._precision.loss_scale()

    def clip_grad_value_(self, parameters: Tensors, clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value], unless gradients accumulate.

        Args:
            parameters: those whose gradients are clipped, of any shapes.
            clip_value: the largest absolute value.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> accelerator.backward((3 * weight).sum())
            >>> accelerator.clip_grad_value_([weight], clip_value=0.5)
            >>> weight.grad
            tensor([0.5000, 0.5000])
        """
        if self.sync_gradients:
            self._strategy.clip_grad_value_(self._unscaled(parameters), clip_value)

    def _unscaled(self, parameters: Tensors) -> list[torch.Tensor]:
        tensors = _as_list(parameters)
        self._precision.unscale([one.optimizer for one in self._all(PreparedOptimizer)], tensors)
        return tensors


def _as_list(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
