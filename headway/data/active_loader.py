"""The loops over prepared loaders that this process is in, and what their batches are made of.

They are the process's own, not an Accelerator's: each of several finds the same current batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class Round(NamedTuple):
    """The samples of one batch of all ranks together; 0 where a number is unknown."""

    real: int = 0  # those of the data set; the others repeat samples to give ranks equally many
    total: int = 0
    full: int = 0  # how many a round has as a rule; the last one may have fewer
    is_even: bool = True  # whether every rank has equally many


class Reading:
    """One walk through a prepared data loader, as of the batch that it last gave out."""

    def __init__(self) -> None:
        self.round = Round()
        self.is_last = False
        self._calls = 0
        self._rows: dict[int, float] = {}  # n-th call for a batch -> results for a sample

    def gives(self, round: Round, *, is_last: bool) -> None:
        """Note that a batch is given out: it is the current one until its loop ends."""
        self.round, self.is_last, self._calls = round, is_last, 0
        _open.sort(key=lambda other: other is self)

    def without_repeats(self, gathered: Any, num_ranks: int) -> Any:
        """Return results of all ranks for the current batch without those of repeated samples.

        A result of the usual length for a batch that is shorter than usual (`loss.repeat(
        batch_size)`) is cut to the batch. Where both readings of a length are possible, the number
        of results for a sample in the first batch decides.

        Args:
            gathered: a list or tensor with equally many entries for each sample of the batch, in
                the order of the ranks; anything else is returned as it is.
        """
        real, total, full, _ = self.round
        self._calls += 1
        is_tensor = isinstance(gathered, torch.Tensor) and gathered.ndim > 0
        if not total or not (is_tensor or isinstance(gathered, list)):
            return gathered
        entries = len(gathered)
        is_only_one = self.is_last and entries == full
        usual = self._rows.setdefault(self._calls, 1 if is_only_one else entries / total)
        if usual != int(usual):  # one result for a batch, or for anything else but samples
            return gathered
        rows = int(usual)
        if entries == rows * full > rows * total:
            starts = range(0, entries, entries // num_ranks)
            kept = [start + one for start in starts for one in range(rows * total // num_ranks)]
            kept = kept[: rows * real]
            return gathered[kept] if is_tensor else [gathered[one] for one in kept]
        return gathered if entries % total else gathered[: entries // total * real]


_open: list[Reading] = []


@contextmanager
def opened() -> Iterator[Reading]:
    """Hold one walk through a loader, from its first batch until the loop is left."""
    reading = Reading()
    _open.append(reading)
    try:
        yield reading
    finally:
        _open[:] = [other for other in _open if other is not reading]


def current_reading() -> Reading:
    """Return the innermost loop over a prepared loader; outside all of them one of no batch."""
    return _open[-1] if _open else Reading()
