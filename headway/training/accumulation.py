"""Gradient accumulation: counting micro-batches, and weighting gradients by tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from headway.data.active_loader import current_loop
from headway.data.loader_set import COUNTED
from headway.devices.table import kind_of
from headway.distributed.handler import KwargsHandler, check_entries, check_range
from headway.distributed.world import rank_and_size
from headway.errors import Code, UsageError


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Configures gradient accumulation; replaces `gradient_accumulation_steps`.

    Args:
        num_steps: micro-batches per optimizer step. None means the launcher's setting, or else 1.
        adjust_scheduler: whether the schedule is defined in optimizer steps. As in Accelerate, this
            does not change the learning rates, because a prepared scheduler never steps while
            gradients accumulate.
        sync_with_dataloader: the last batch of a loader completes an optimizer step and resets the
            count. With False the count continues across epochs.
        sync_each_batch: synchronize gradients in every backward pass. This is slower, but saves
            the memory that some strategies need for unsynchronized gradients.

    Raises:
        UsageError: `num_steps` is not an integer of at least 1.

    Examples:
        >>> from headway.utils import GradientAccumulationPlugin
        >>> GradientAccumulationPlugin(num_steps=4).to_kwargs()
        {'num_steps': 4}
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("GradientAccumulationPlugin", 1, num_steps=self.num_steps)


class AccumulationWindow:
    """The current optimizer step of a set of models."""

    def __init__(self, models: str) -> None:
        self.models = models  # indices of the prepared models
        self.micro_batches = 0
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        """Token count of the previous micro-batches, and the divisor of their loss sums."""
        self.is_fresh: bool | None = None  # before the backward pass of a micro-batch; None: unused
        self.by_tokens: bool | None = None  # whether this step uses num_tokens; None: no pass yet
        self.parameter: torch.Tensor | None = None  # one that is trained
        self.has_gradient = False  # that parameter, after this step's last backward pass
        self._batch: tuple[Any, int] = (None, 0)  # the loop and its batch number
        self._parts, self._usual = 0, 1  # micro-batches in the current and the previous batch
        self._has_ended_early = False  # in the current batch, the last of its loop

    def begin(self, steps: int, ends_with_loader: bool) -> bool:
        """Count a micro-batch, and return whether it completes an optimizer step."""
        loop = current_loop()
        batch = loop, loop.number
        if batch != self._batch:
            before, number = self._batch
            was_last = before is not None and before.is_last and before.number == number
            if was_last and self.micro_batches and ends_with_loader:
                raise self._parts_differ("fewer")
            self._usual = self._parts if loop is before else 1
            self._batch, self._parts, self._has_ended_early = batch, 0, False
        if self._has_ended_early:
            raise self._parts_differ("more")
        if self.micro_batches == 0:
            self.by_tokens, self.has_gradient = None, False
        self.is_fresh = True
        self._parts += 1
        self.micro_batches += 1
        if self.micro_batches < steps:
            is_at_end = ends_with_loader and loop.is_last and self._parts >= self._usual
            self._has_ended_early = is_at_end
            if not is_at_end:
                return False
        self.micro_batches = 0
        return True

    def _parts_differ(self, how: str) -> UsageError:
        return UsageError(
            f"the last batch of a loader has {how} micro-batches than the batch before it"
            f" ({self._usual}), so the end of the optimizer step is unknown",
            where="the script's loop with accelerator.accumulate(...)",
            fix="pass GradientAccumulationPlugin(num_steps=..., sync_with_dataloader=False), which"
            " counts across all loaders; or split all batches into the same number"
            " of parts",
            code=Code.ACCUMULATION,
        )


class MicroBatch(AbstractContextManager[None]):
    """The block of `accumulate()`, in which gradients are exchanged as in the inner context."""

    def __init__(self, accumulation: Accumulation, inner: AbstractContextManager[Any]) -> None:
        self._accumulation, self._inner = accumulation, inner

    def __enter__(self) -> None:
        self._accumulation.is_within = True
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        self._accumulation.is_within = False
        return self._inner.__exit__(*error)


class Accumulation:
    """Counts micro-batches; gradients are due after `steps` of them, and at the end of the loader.

    Each set of models that is accumulated together has its own count. Counts are equal on all
    ranks, because every rank gets the same number of batches. Leaving a loop early keeps the count,
    because the gradients are still in the model and contribute to the next step. If each batch is
    split into n micro-batches, a loader's last step ends with the n-th part of its last batch.

    Loss sums are weighted so that the gradients are those of the mean loss over all tokens of a
    step. The number of tokens is known only in the last micro-batch. Before the backward pass of
    that micro-batch, in which gradients are averaged, the ranks sum their token counts, and each
    rank scales the gradients that it has accumulated. This costs one small all-reduce per optimizer
    step. Without accumulation, the gradients are not modified.
    """

    def __init__(self, steps: int, plugin: GradientAccumulationPlugin | None = None) -> None:
        self.steps = steps  # micro-batches per optimizer step
        self._refuses_tokens = False
        self.configure(plugin or GradientAccumulationPlugin())
        self.reset()

    def configure(self, plugin: GradientAccumulationPlugin) -> None:
        """Apply the plugin's settings; keep the number of steps if its `num_steps` is None."""
        self.plugin = plugin
        self.steps = plugin.num_steps or self.steps

    def reset(self) -> None:
        """Reset the count for all optimizers that use this accumulation."""
        self.sync_gradients = True  # whether gradients are due
        self._steps: dict[str, AccumulationWindow] = {}
        self.step = self._step_of("")  # of the most recently accumulated models
        self._by_models: dict[tuple[torch.nn.Module, ...], AccumulationWindow] = {}
        self.is_within = False  # whether the script is in an `accumulate()` block
        self._before = (0, True)  # micro-batches and `sync_gradients` before the latest micro-batch
        self.num_backward = 0  # backward passes since the gradients were used or dropped
        self.most_backward = 0  # of an optimizer step
        self.resumed_backward = 0  # `num_backward` when the run resumed within an epoch
        self.report: Callable[[str], object] = bool  # logs a note once, on rank 0

    @property
    def is_open(self) -> bool:
        """Whether there are gradients of an incomplete optimizer step."""
        return any(step.micro_batches for step in self._steps.values())

    @property
    def has_gradients(self) -> bool:
        """Whether gradients await an optimizer step, even without `accumulate()`."""
        return self.is_open or self.num_backward > 0

    def use_gradients(self) -> None:
        """Begin the next optimizer step; after a resume, compare the number of backward passes."""
        if self.num_backward > self.most_backward:
            is_whole = 0 < self.most_backward <= self.num_backward - self.resumed_backward
            if self.resumed_backward and is_whole:
                self.report(COUNTED)
            self.most_backward = self.num_backward
        self.num_backward = self.resumed_backward = 0

    def watch_gradients(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        """After a backward pass, record for `begin_backward` that there are gradients."""
        step = self.step
        if step.parameter is None:
            step.parameter = next((p for p in parameters() if p.requires_grad), None)
        step.has_gradient = step.parameter is not None and step.parameter.grad is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the position within the current optimizer step."""
        steps = self._steps.items()
        return {
            "micro_batches": {key: step.micro_batches for key, step in steps if step.micro_batches},
            "num_backward": self.num_backward,
            "most_backward": self.most_backward,
            "sync_gradients": self.sync_gradients,
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key in {*self._steps, *state["micro_batches"]}:
            self._step_of(key).micro_batches = state["micro_batches"].get(key, 0)
        self.num_backward, self.most_backward = state["num_backward"], state["most_backward"]
        self.sync_gradients = state["sync_gradients"]

    @property
    def tokens(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The pending token counts and divisors, keyed by the indices of the models."""
        return {key: step.pending for key, step in self._steps.items() if step.pending is not None}

    @tokens.setter
    def tokens(self, tokens: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        for key in {*self._steps, *tokens}:
            self._step_of(key).pending = tokens.get(key)

    def _step_of(self, key: str) -> AccumulationWindow:
        return self._steps.setdefault(key, AccumulationWindow(key))

    @property
    def has_begun(self) -> bool:
        """Whether the script has entered `accumulate()`."""
        return bool(self._by_models)

    def begin_micro_batch(
        self, models: tuple[torch.nn.Module, ...], prepared: Callable[[], Sequence[torch.nn.Module]]
    ) -> None:
        """Count a micro-batch of `models` (if empty, of all models), and set `sync_gradients`."""
        try:
            step = self._by_models.get(models)
        except TypeError:  # not a model but an unhashable object, such as a list
            step = None
        if step is None:
            check_entries("models", models, torch.nn.Module, "Accelerator.accumulate")
            numbers = [at for at, model in enumerate(prepared()) if not models or model in models]
            step = self._by_models[models] = self._step_of(",".join(map(str, numbers)))
        self.step, self._before = step, (step.micro_batches, self.sync_gradients)
        self.sync_gradients = step.begin(self.steps, self.plugin.sync_with_dataloader)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Exclude a micro-batch whose batch the script requests within its `accumulate()` block."""
        step, counted = self.step, (self.step.micro_batches, self.sync_gradients)
        if self.is_within and step.is_fresh:
            step.micro_batches, self.sync_gradients = self._before
        yield
        step.micro_batches, self.sync_gradients = counted  # unless the run stops here

    def is_apart(self, number: int) -> bool:
        """Return whether a prepared model belongs only to other accumulation windows."""
        others = (step for step in self._steps.values() if step is not self.step)
        own = self.step.models.split(",")
        return str(number) not in own and any(str(number) in o.models.split(",") for o in others)

    def begin_backward(self, by_tokens: bool) -> bool:
        """Return whether gradients of the optimizer step's earlier micro-batches were reset.

        Raise UsageError if a backward pass cannot be combined with the previous passes. In the last
        micro-batch, all gradients of a step are scaled by the step's token count, so all losses
        must have token counts, and each token must be counted once.
        """
        step = self.step
        if step.is_fresh is None:  # the script counts micro-batches itself
            return False
        is_first, step.is_fresh = step.is_fresh, False
        is_reset = step.parameter is not None and step.parameter.grad is None
        has_lost = is_reset and is_first and step.has_gradient and self.num_backward > 0
        before, step.by_tokens = step.by_tokens, by_tokens
        if before is None or not (by_tokens or before):
            return has_lost
        if not is_first or before != by_tokens:
            raise UsageError(
                "an optimizer step mixes backward() with and without num_tokens"
                if is_first
                else "backward(num_tokens=...) is not the only backward() of its micro-batch",
                where="the script's loop with accelerator.accumulate(...)",
                fix="call backward() once in each micro-batch, with the sum of its losses: "
                "backward(loss_sum + num_tokens * other_mean, num_tokens=num_tokens)",
                code=Code.ACCUMULATION,
            )
        return has_lost

    @contextmanager
    def refusing_tokens(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        """Enter `context`, and reject token counts in it, because the last pass is unknown."""
        before, self._refuses_tokens = self._refuses_tokens, True
        try:
            with context:
                yield
        finally:
            self._refuses_tokens = before

    def start_of_backward(
        self,
        loss_sum: torch.Tensor,
        num_tokens: int | torch.Tensor,
        parameters: Callable[[], Iterable[torch.Tensor]],
        *,
        is_synced: bool = False,
    ) -> torch.Tensor:
        """Return the initial gradient for the backward pass of `loss_sum`.

        The loss, of shape [] or [1], is the sum over this rank's tokens. With `is_synced`, ranks
        average the gradients of every micro-batch, not only of the last one.
        """
        if self._refuses_tokens:
            raise UsageError(
                "backward(num_tokens=...) was called in no_sync()",
                where="the script's accelerator.no_sync(...)",
                fix="use accelerator.accumulate(model) with gradient_accumulation_steps instead",
                code=Code.ACCUMULATION,
            )
        if loss_sum.numel() != 1:
            raise UsageError(
                f"the loss must have a single element, but has shape {list(loss_sum.shape)}",
                where="the script's backward(loss, num_tokens=...)",
                fix="pass the sum of the tokens' losses: reduction='sum'",
                code=Code.LOSS,
            )
        one = torch.ones_like(loss_sum, requires_grad=False)
        tokens = _counted(num_tokens).to(loss_sum.device)
        if not self.sync_gradients:
            if self.step.pending is None:
                most = tokens.clamp(min=1)
                if is_synced and rank_and_size()[1] > 1:
                    dist.all_reduce(most, dist.ReduceOp.MAX)
                self.step.pending = torch.zeros_like(tokens), most
            before, unit = self.step.pending
            self.step.pending = before + tokens, unit
            return one / unit
        pending = self.step.pending
        weight = _weight(tokens if pending is None else tokens + pending[0])
        if pending is not None:
            _scale(parameters(), weight * pending[1])
            self.step.pending = None
        return (one * weight).to(loss_sum.dtype)


def _scale(parameters: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_device.setdefault(parameter.grad.device, []).append(parameter.grad)
    for device, gradients in by_device.items():  # one call: 300 DTensors would take 10 ms
        torch._foreach_mul_(gradients, factor.to(device))


def _weight(tokens: torch.Tensor) -> torch.Tensor:
    """Return the weight of a token in a sum that is averaged over ranks."""
    size = rank_and_size()[1]
    if size > 1:
        tokens = tokens.clone()
        dist.all_reduce(tokens)
    dtype = torch.float64 if kind_of(tokens.device.type).has_fp64 else torch.float32
    return size / tokens.clamp(min=1).to(dtype)


def _counted(num_tokens: int | torch.Tensor) -> torch.Tensor:
    """Return `num_tokens` as a tensor of shape [], without synchronizing with the GPU."""
    tokens = torch.as_tensor(num_tokens).detach()
    is_whole = not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype is torch.bool)
    if tokens.numel() != 1 or not is_whole or (tokens.device.type == "cpu" and tokens < 0):
        raise UsageError(
            f"invalid value {num_tokens} for num_tokens: must be a non-negative integer",
            where="the script's backward(loss, num_tokens=...)",
            fix="pass the number of tokens in the loss: (labels != -100).sum()",
            code=Code.ACCUMULATION,
        )
    return tokens.reshape(())
