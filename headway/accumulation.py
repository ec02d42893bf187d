"""Where the training loop stands: which loader is being read, and when gradients are due."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Reading:
    """One walk through a prepared data loader, as of the batch that it last gave out.

    `real` of `total` samples in the batch of all ranks together come from the data set; the others
    repeat samples so that every rank has equally many.
    """

    is_last: bool = False
    real: int = 0
    total: int = 0


class Accumulation:
    """Counts micro-batches: gradients are due every `steps`, and at the end of the loader.

    Every rank counts the same, because every rank gets equally many batches. A loop that is left
    early keeps its count: its gradients are still in the model, and count towards the next step.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.sync_gradients = True
        self._micro_batches = 0
        self._readings: list[Reading] = []

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """Hold one walk through a loader, from its first batch until the loop is left."""
        reading = Reading()
        self._readings.append(reading)
        try:
            yield reading
        finally:
            self._readings = [other for other in self._readings if other is not reading]

    def gave_batch(self, reading: Reading) -> None:
        """Note that `reading` gave out a batch: it is the current one until it ends."""
        self._readings.sort(key=lambda other: other is reading)

    @property
    def current(self) -> Reading | None:
        """The innermost loop over a prepared loader, None outside all of them."""
        return self._readings[-1] if self._readings else None

    def without_repeats(self, gathered: Any) -> Any:
        """Return results of all ranks for the current batch without those of repeated samples.

        Args:
            gathered: a list or tensor with equally many entries for each sample of the batch, in
                the order of the ranks; anything else is returned as it is.
        """
        if self.current is None or self.current.real == self.current.total:
            return gathered
        entries, rest = divmod(len(gathered), self.current.total)
        return gathered if rest else gathered[: entries * self.current.real]

    def begin_micro_batch(self) -> None:
        """Count one more micro-batch, and decide whether its gradients are due."""
        self._micro_batches += 1
        at_end = self.current is not None and self.current.is_last
        self.sync_gradients = at_end or self._micro_batches >= self.steps
        if self.sync_gradients:
            self._micro_batches = 0
