"""When gradients are due: every so many micro-batches, and at the end of a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from headway.data.active_loader import current_loop
from headway.devices.table import kind_of
from headway.distributed.handler import KwargsHandler, check_entries, check_range
from headway.distributed.world import rank_and_size
from headway.errors import UsageError


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients accumulate over micro-batches; in place of `gradient_accumulation_steps`.

    Args:
        num_steps: micro-batches in one optimizer step; None is what the launcher says, else 1.
        adjust_scheduler: whether the schedule is written in optimizer steps. The learning rates are
            the same either way, as in Accelerate: a prepared scheduler never steps while
            gradients accumulate.
        sync_with_dataloader: the last batch of a loader makes an optimizer step, and begins the
            count anew. With False the count goes on over epochs.
        sync_each_batch: ranks exchange gradients in every backward pass: slower, but without the
            memory that unexchanged gradients need in some strategies.

    Raises:
        UsageError: `num_steps` is not a whole number of at least 1.

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
    """The optimizer step that is under way for a set of models."""

    def __init__(self, models: str) -> None:
        self.models = models  # their numbers among the prepared ones
        self.micro_batches = 0
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        """The tokens of the micro-batches before this one, and what their sums were divided by."""
        self.is_fresh: bool | None = None  # no backward pass in this micro-batch; None: in none
        self.by_tokens: bool | None = None  # those of this step have num_tokens; None: no pass yet
        self._batch: tuple[Any, int] = (None, 0)  # the loop, and the number of its batch
        self._parts, self._usual = 0, 1  # micro-batches of this batch, and of the one before
        self._has_ended_early = False  # in this batch, the last of its loop

    def begin(self, steps: int, ends_with_loader: bool) -> bool:
        """Count one more micro-batch, and return whether its gradients are due."""
        loop = current_loop()
        batch = loop, loop.number
        if batch != self._batch:
            before, number = self._batch
            was_last = before is not None and before.is_last and before.number == number
            if was_last and self.micro_batches and ends_with_loader:
                raise self._parts_differ(f"fewer micro-batches than the {self._usual} of the one")
            self._usual = self._parts if loop is before else 1
            self._batch, self._parts, self._has_ended_early = batch, 0, False
        if self._has_ended_early:
            raise self._parts_differ(f"more micro-batches than the {self._usual} of the one")
        if self.micro_batches == 0:
            self.by_tokens = None
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

    def _parts_differ(self, what: str) -> UsageError:
        return UsageError(
            f"the last batch of a loader has {what} before it, so where its optimizer step ends is"
            " not known",
            where="the script's loop with accelerator.accumulate(...)",
            fix="pass GradientAccumulationPlugin(num_steps=..., sync_with_dataloader=False), which"
            " counts on over the ends of loaders, or divide all batches into equally many parts",
        )


class Accumulation:
    """Counts micro-batches: gradients are due every `steps`, and at the end of the loader.

    Each set of models that is accumulated together has a count of its own. Every rank counts the
    same, because every rank gets equally many batches. A loop that is left early keeps its count:
    its gradients are still in the model, and count towards the next step. A step that ends with the
    loader ends at the n-th micro-batch of its last batch, if the batch before had n.

    Sums over tokens are weighed so that gradients are those of the mean over all tokens of a step.
    Their number is known only in its last micro-batch. Before the backward pass of that one, in
    which ranks average their gradients, the ranks add up their tokens, and each scales the
    gradients that it has accumulated. One small all-reduce for an optimizer step; without
    accumulation the gradients are not touched at all.
    """

    def __init__(self, steps: int, plugin: GradientAccumulationPlugin | None = None) -> None:
        self.steps = steps  # micro-batches in one optimizer step
        self._refuses_tokens = False
        self.configure(plugin or GradientAccumulationPlugin())
        self.reset()

    def configure(self, plugin: GradientAccumulationPlugin) -> None:
        """Accumulate as `plugin` says; it may leave the number of steps as it is."""
        self.plugin = plugin
        self.steps = plugin.num_steps or self.steps
        self._ends_with_loader = plugin.sync_with_dataloader
        self.exchanges_each_batch = plugin.sync_each_batch

    def reset(self) -> None:
        """Restart the count, for all optimizers that step with this."""
        self.sync_gradients = True  # whether gradients are due
        self._steps: dict[str, AccumulationWindow] = {}
        self.step = self._step_of("")  # that of the models which were accumulated last
        self._by_models: dict[tuple[torch.nn.Module, ...], AccumulationWindow] = {}
        self.num_backward = 0  # backward passes since gradients were used or dropped

    @property
    def is_open(self) -> bool:
        """Whether there are gradients of an optimizer step that is not complete."""
        return any(step.micro_batches for step in self._steps.values())

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait for an optimizer step, also where a script counts by itself."""
        return self.is_open or self.num_backward > 0

    def state_dict(self) -> dict[str, Any]:
        """Return where in an optimizer step training stands."""
        steps = self._steps.items()
        return {
            "micro_batches": {key: step.micro_batches for key, step in steps if step.micro_batches},
            "num_backward": self.num_backward,
            "sync_gradients": self.sync_gradients,
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key in {*self._steps, *state["micro_batches"]}:
            self._step_of(key).micro_batches = state["micro_batches"].get(key, 0)
        self.num_backward = state["num_backward"]
        self.sync_gradients = state["sync_gradients"]

    @property
    def tokens(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """What is pending, by models."""
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
        """Count one more micro-batch of these models, or of all, and decide whether it is due."""
        try:
            step = self._by_models.get(models)
        except TypeError:  # of what is no model, such as a list of them
            step = None
        if step is None:
            check_entries("models", models, torch.nn.Module, "Accelerator.accumulate")
            numbers = [at for at, model in enumerate(prepared()) if not models or model in models]
            step = self._by_models[models] = self._step_of(",".join(map(str, numbers)))
        self.step = step
        self.sync_gradients = step.begin(self.steps, self._ends_with_loader)

    def is_apart(self, number: int) -> bool:
        """Return whether a prepared model is accumulated with others than those of now."""
        others = (step for step in self._steps.values() if step is not self.step)
        own = self.step.models.split(",")
        return str(number) not in own and any(str(number) in o.models.split(",") for o in others)

    def note_backward(self, by_tokens: bool) -> None:
        """Raise UsageError if a backward pass cannot be weighed together with those before it.

        The last micro-batch of a step scales all its gradients by the step's tokens: its losses
        must have them, and each token may count once.
        """
        step = self.step
        if step.is_fresh is None:  # the script counts micro-batches by itself
            return
        is_first, step.is_fresh = step.is_fresh, False
        before, step.by_tokens = step.by_tokens, by_tokens
        if before is None or not (by_tokens or before):
            return
        if not is_first or before != by_tokens:
            raise UsageError(
                "an optimizer step has backward() with num_tokens and without"
                if is_first
                else "backward(num_tokens=...) is not the only backward() of its micro-batch",
                where="the script's loop with accelerator.accumulate(...)",
                fix="call backward() once in each micro-batch, with the sum of its losses: "
                "backward(loss_sum + num_tokens * other_mean, num_tokens=num_tokens)",
            )

    @contextmanager
    def refusing_tokens(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        """Enter `context`, in which nothing says which backward pass is the last of its step."""
        before, self._refuses_tokens = self._refuses_tokens, True
        try:
            with context:
                yield
        finally:
            self._refuses_tokens = before

    def refuse_step(self) -> NoReturn:
        """Refuse to use gradients before they are those of the mean."""
        raise UsageError(
            "optimizer.step() before the last backward(num_tokens=...) of the step",
            where="the script's accelerator.accumulate(...)",
            fix="call backward(num_tokens=...) in each micro-batch, on every rank",
        )

    def start_of_backward(
        self,
        loss_sum: torch.Tensor,
        num_tokens: int | torch.Tensor,
        parameters: Callable[[], Iterable[torch.Tensor]],
        *,
        is_exchanged: bool = False,
    ) -> torch.Tensor:
        """Return the gradient with which the backward pass of `loss_sum` begins.

        The loss is the sum of those of this rank's tokens, of shape [] or [1]. `is_exchanged`:
        ranks average the gradients of every micro-batch, not of the last alone.
        """
        if self._refuses_tokens:
            raise UsageError(
                "backward(num_tokens=...) in no_sync()",
                where="the script's accelerator.no_sync(...)",
                fix="use accelerator.accumulate(model) with gradient_accumulation_steps instead",
            )
        if loss_sum.numel() != 1:
            raise UsageError(
                f"the loss has shape {list(loss_sum.shape)}, not one element",
                where="the script's backward(loss, num_tokens=...)",
                fix="pass the sum of the tokens' losses: reduction='sum'",
            )
        one = torch.ones_like(loss_sum, requires_grad=False)
        tokens = _counted(num_tokens).to(loss_sum.device)
        if not self.sync_gradients:
            if self.step.pending is None:
                most = tokens.clamp(min=1)
                if is_exchanged and rank_and_size()[1] > 1:
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
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, factor.to(device))


def _weight(tokens: torch.Tensor) -> torch.Tensor:
    """Return what each token of any rank counts in a sum that the ranks will average."""
    size = rank_and_size()[1]
    if size > 1:
        tokens = tokens.clone()
        dist.all_reduce(tokens)
    dtype = torch.float64 if kind_of(tokens.device.type).has_fp64 else torch.float32
    return size / tokens.clamp(min=1).to(dtype)


def _counted(num_tokens: int | torch.Tensor) -> torch.Tensor:
    """Return the number as a tensor of shape []; the value of one on a GPU is not waited for."""
    tokens = torch.as_tensor(num_tokens).detach()
    is_whole = not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype is torch.bool)
    if tokens.numel() != 1 or not is_whole or (tokens.device.type == "cpu" and tokens < 0):
        raise UsageError(
            f"num_tokens is {num_tokens}, not a whole number of at least 0",
            where="the script's backward(loss, num_tokens=...)",
            fix="pass the number of tokens in the loss: (labels != -100).sum()",
        )
    return tokens.reshape(())
