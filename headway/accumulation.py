"""When gradients are due: every so many micro-batches, and at the end of a loader."""

from __future__ import annotations

from headway.data.active_loader import current_reading


class Accumulation:
    """Counts micro-batches: gradients are due every `steps`, and at the end of the loader.

    Every rank counts the same, because every rank gets equally many batches. A loop that is left
    early keeps its count: its gradients are still in the model, and count towards the next step.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.reset()

    def reset(self) -> None:
        """Begin anew, for all optimizers that keep time with this."""
        self.sync_gradients = True
        self._micro_batches = 0

    def begin_micro_batch(self) -> None:
        """Count one more micro-batch, and decide whether its gradients are due."""
        self._micro_batches += 1
        self.sync_gradients = current_reading().is_last or self._micro_batches >= self.steps
        if self.sync_gradients:
            self._micro_batches = 0
