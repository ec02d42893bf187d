"""When gradients are due: every so many micro-batches, and at the end of a loader."""

from __future__ import annotations

from typing import Any

import torch

from headway.data.active_loader import current_loop
from headway.plugins.accumulation import GradientAccumulationPlugin


class Accumulation:
    """Counts micro-batches: gradients are due every `steps`, and at the end of the loader.

    Every rank counts the same, because every rank gets equally many batches. A loop that is left
    early keeps its count: its gradients are still in the model, and count towards the next step.

    Attributes:
        steps: micro-batches in one optimizer step.
        sync_gradients: whether gradients are due.
        num_micro_batches: how many were begun so far.
        num_steps: how many optimizer steps those were the first of.
        plugin: how they accumulate, besides the number of steps.
    """

    def __init__(self, steps: int, plugin: GradientAccumulationPlugin | None = None) -> None:
        self.steps = steps
        self.configure(plugin or GradientAccumulationPlugin())
        self.reset()

    def configure(self, plugin: GradientAccumulationPlugin) -> None:
        """Accumulate as `plugin` says; it may leave the number of steps as it is."""
        self.plugin = plugin
        self.steps = plugin.num_steps or self.steps
        self._ends_with_loader = plugin.sync_with_dataloader
        self.exchanges_each_batch = plugin.sync_each_batch

    def reset(self) -> None:
        """Begin anew, for all optimizers that step with this."""
        self.sync_gradients = True
        self._micro_batches = self.num_micro_batches = self.num_steps = 0

    @property
    def is_open(self) -> bool:
        """Whether there are gradients of an optimizer step that is not complete."""
        return self._micro_batches > 0

    def state_dict(self, *, at_step_end: bool = False) -> dict[str, Any]:
        """Return where in an optimizer step training stands, or where it stands at its end."""
        return {
            "micro_batches": 0 if at_step_end else self._micro_batches,
            "sync_gradients": at_step_end or self.sync_gradients,
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called."""
        self._micro_batches = state["micro_batches"]
        self.sync_gradients = state["sync_gradients"]

    def begin_micro_batch(self) -> None:
        """Count one more micro-batch, and decide whether its gradients are due."""
        self.num_micro_batches += 1
        self.num_steps += self._micro_batches == 0
        self._micro_batches += 1
        self.sync_gradients = self._micro_batches >= self.steps or (
            self._ends_with_loader and current_loop().is_last
        )
        if self.sync_gradients:
            self._micro_batches = 0

    def gradient_of(self, loss: torch.Tensor) -> torch.Tensor:
        """Return 1 / steps, as the gradient to start the backward pass of `loss` with.

        The same bits as those of a backward pass of `loss / steps`, without the division. A new
        tensor each time: the script's own backward functions may write into it.
        """
        return torch.full_like(loss, 1 / self.steps, requires_grad=False)
