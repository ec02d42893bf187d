"""What each backward pass counts in the gradients of an optimizer step."""

from __future__ import annotations

import torch

from headway.distributed.meeting import meet, run_ahead
from headway.errors import UsageError
from headway.training.micro_batches import MicroBatches
from headway.training.training import Training


class Weighing:
    """Weighs losses: of one of several micro-batches, some tokens of all, or a part of a batch.

    Attributes:
        micro_batches: splits batches that do not fit into memory; None without `auto_micro_batch`.
    """

    def __init__(self, training: Training, *, auto_micro_batch: bool) -> None:
        self._training = training
        self.micro_batches: MicroBatches | None = None
        if auto_micro_batch:
            self.micro_batches = MicroBatches(
                training.accumulation, training.strategy, training.token_mean, training.parameters
            )

    def weighed(
        self,
        loss: torch.Tensor,
        num_tokens: int | torch.Tensor | None,
        gradient: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss, and the gradient with which its backward pass begins; None is 1.

        Args:
            num_tokens: how many tokens the loss is the sum of; None: it is a mean.
            gradient: what the script has given.

        Raises:
            UsageError: it cannot be weighed together with those before it.
        """
        training, accumulation = self._training, self._training.accumulation
        if self.micro_batches is not None and self.micro_batches.is_active:
            loss = self.micro_batches.weighed(loss, by_tokens=num_tokens is not None)
        elif accumulation.steps > 1 and accumulation.num_steps:
            training.token_mean.refuse_mixture(accumulation, num_tokens is not None)
        if num_tokens is not None:
            if gradient is not None:
                raise UsageError(
                    "backward() got both num_tokens and gradient",
                    where="the script's backward(loss, num_tokens=..., gradient=...)",
                    fix="multiply the loss by the gradient, and pass num_tokens alone",
                )
            return loss, self._by_tokens(loss, num_tokens)
        if accumulation.steps > 1:
            if gradient is not None:
                return loss, gradient / accumulation.steps
            if loss.numel() == 1:  # for others torch says that it needs a gradient
                return loss, accumulation.gradient_of(loss)
        return loss, gradient

    def _by_tokens(self, loss: torch.Tensor, num_tokens: int | torch.Tensor) -> torch.Tensor:
        """Return the gradient with which the backward pass of a sum over tokens begins."""
        training = self._training
        if training.strategy.shards:
            training.token_mean.refuse_withheld()
            if not run_ahead([loss]):
                meet("backward(num_tokens=...)")
        return training.token_mean.start_of_backward(
            loss,
            num_tokens,
            training.accumulation.sync_gradients,
            training.parameters,
            is_exchanged=training.strategy.shards or training.accumulation.exchanges_each_batch,
        )

    def after_backward(self) -> None:
        """Let the parts of a batch follow each other."""
        if self.micro_batches is not None and self.micro_batches.is_active:
            self.micro_batches.after_backward()
