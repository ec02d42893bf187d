"""Gradients of the mean over all tokens of an optimizer step, however they are shared out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from headway.errors import UsageError
from headway.world import rank_and_size


class TokenMean:
    """Weighs the sums of micro-batches so that gradients are those of the mean over all tokens.

    The number of tokens of an optimizer step is known only in its last micro-batch. Before the
    backward pass of that one, in which ranks average their gradients, the ranks add up their
    tokens, and each scales the gradients that it has accumulated. One small all-reduce for an
    optimizer step; without accumulation the gradients are not touched at all.
    """

    def __init__(self) -> None:
        self._is_withheld = False
        self.reset()

    def reset(self) -> None:
        """Begin a new optimizer step."""
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        """The tokens of the micro-batches before this one, and what their sums were divided by."""

    @contextmanager
    def withheld(self, no_sync: AbstractContextManager[Any]) -> Iterator[None]:
        """Enter `no_sync`; backward passes in it are not the last ones of their step."""
        before, self._is_withheld = self._is_withheld, True
        try:
            with no_sync:
                yield
        finally:
            self._is_withheld = before

    def start_of_backward(
        self,
        loss_sum: torch.Tensor,
        num_tokens: int | torch.Tensor,
        is_due: bool,
        parameters: Callable[[], Iterable[torch.Tensor]],
    ) -> torch.Tensor:
        """Return the gradient with which the backward pass of `loss_sum` begins.

        Args:
            loss_sum: the sum of the losses of this rank's tokens, of shape [] or [1].
            num_tokens: how many those are, 0 or more; an int, or an integer tensor of one element.
            is_due: whether this is the last micro-batch of the step, outside of `withheld`.
            parameters: returns those whose gradients accumulate.

        Raises:
            UsageError: the loss has several elements.
        """
        if loss_sum.numel() != 1:
            raise UsageError(
                f"the loss has shape {list(loss_sum.shape)}, not one element",
                where="the script's backward(loss, num_tokens=...)",
                fix="pass the sum of the tokens' losses: reduction='sum'",
            )
        one = torch.ones_like(loss_sum, requires_grad=False)
        tokens = torch.as_tensor(num_tokens, device=loss_sum.device).detach().reshape(())
        if self._is_withheld or not is_due:
            before, unit = self.pending or (torch.zeros_like(tokens), tokens.clamp(min=1))
            self.pending = before + tokens, unit
            return one / unit
        if self.pending is None:
            weight = _weight(tokens)
        else:
            weight = self._scale(parameters(), tokens + self.pending[0], self.pending[1])
        return (one * weight).to(loss_sum.dtype)

    def finish(self, parameters: Iterable[torch.Tensor]) -> None:
        """Scale accumulated gradients where no more backward pass follows in the step."""
        if self.pending is not None:
            self._scale(parameters, *self.pending)

    def _scale(
        self,
        parameters: Iterable[torch.Tensor],
        tokens: torch.Tensor,
        unit: torch.Tensor,
    ) -> torch.Tensor:
        weight = _weight(tokens)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_((weight * unit).to(parameter.grad.device))
        self.reset()
        return weight


def _weight(tokens: torch.Tensor) -> torch.Tensor:
    """Return what each token of any rank counts in a sum that the ranks will average."""
    _, size = rank_and_size()
    if size > 1:
        tokens = tokens.clone()
        dist.all_reduce(tokens)
    dtype = torch.float32 if tokens.device.type == "mps" else torch.float64  # MPS has no fp64
    return size / tokens.clamp(min=1).to(dtype)


def refuse_gradient(arguments: Mapping[str, object]) -> None:
    """Raise UsageError if backward() got a gradient together with a number of tokens."""
    if arguments.get("gradient") is not None:
        raise UsageError(
            "backward() got both num_tokens and gradient",
            where="the script's backward(loss, num_tokens=..., gradient=...)",
            fix="multiply the loss by the gradient, and pass num_tokens alone",
        )
