"""Prepared loaders, the loops over them that this process is in, and what batches are made of.

The loops belong to the process, not to an Accelerator: each of several finds the same batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from headway.distributed.world import rank_and_size


class TrainingLoader(DataLoader[Any]):
    """A prepared loader; each class has `epoch`, `without_first` and `sharing_evenly`."""

    without_first: Any


class GlobalBatch(NamedTuple):
    """How many samples one batch of all ranks together has; 0 where a number is unknown."""

    samples: int = 0  # different ones
    padded: int = 0  # with those that are repeated to give all ranks equally many
    full: int = 0  # in any batch but an epoch's last one, if as many ranks have a part of it
    shares: tuple[int, ...] = ()  # those of each rank that has any; empty if all have equally many
    repeated: int = 0  # of this rank's samples, the last ones, where it reads data of its own

    def of_rank(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """Return how many samples a rank has, and how many of them, the first, are not repeated."""
        shares = self.shares or (self.padded // num_ranks,) * num_ranks
        if rank >= len(shares):
            return 0, 0
        new = min(max(self.samples - sum(shares[:rank]), 0), shares[rank])
        return shares[rank] + self.repeated, new


class Passed(NamedTuple):
    """What this rank was given in a pass; the repeated samples are the last ones."""

    samples: int
    repeated: int


class LoaderLoop:
    """One loop over a prepared data loader, as of its current batch."""

    def __init__(self, loader: Any = None) -> None:
        self.loader = loader
        self.batch = GlobalBatch()
        self.is_last = False  # whether the current batch is the last one
        self.passed: Passed | None = None  # the pass that has ended in the current batch
        self.number = 0  # of the current batch, from 1
        self._num_counted = 0  # of the batches before those that are like the current one
        self._counted: Passed | None = Passed(0, 0)  # before these; None if it is unknown
        self.rows: set[int] = set()  # for each sample, of the results gathered for full batches

    def begin_batch(self, batch: GlobalBatch, *, is_last: bool) -> None:
        """Make `batch` the current one, and this loop the innermost."""
        if batch is not self.batch and batch != self.batch:
            self._counted, self._num_counted = self._count(), self.number
            self.batch = batch
        self.number += 1
        self.is_last, self.passed = is_last, None
        if not _loops or _loops[-1] is not self:
            self._leave()
            _loops.append(self)

    def end(self) -> None:
        """Leave the loop."""
        self._leave()
        current_loop().passed = self._count()

    def _leave(self) -> None:
        _loops[:] = [other for other in _loops if other is not self]

    def _count(self) -> Passed | None:
        num_alike = self.number - self._num_counted
        if not num_alike or self._counted is None:
            return self._counted
        samples, new = self.batch.of_rank(*rank_and_size())
        is_in_between = new and (self._counted.repeated or (new < samples and num_alike > 1))
        if not samples or is_in_between:  # repeats are not all at the end
            return None
        all_of_it, repeated = self._counted
        return Passed(all_of_it + num_alike * samples, repeated + num_alike * (samples - new))


_loops: list[LoaderLoop] = []  # the innermost is the last
_NO_LOOP = LoaderLoop()


def current_loop() -> LoaderLoop:
    """Return the innermost loop over a prepared loader; outside all of them one without batch."""
    return _loops[-1] if _loops else _NO_LOOP


def open_loops() -> list[LoaderLoop]:
    """Return the loops that this process is in, from outside in."""
    return [*_loops]
