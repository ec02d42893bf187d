"""The active loops over prepared loaders, and the sample counts of their batches.

Loops are tracked per process, not per Accelerator, so all Accelerators see the same batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from headway.distributed.world import rank_and_size

LOOP = "a loop over a prepared DataLoader"  # the name of the call in messages


class TrainingLoader(DataLoader[Any]):
    """Base class of prepared loaders, all of which have `epoch` and `without_first`."""

    without_first: Any


class GlobalBatch(NamedTuple):
    """Sample counts of a global batch; 0 means unknown."""

    samples: int = 0  # distinct
    padded: int = 0  # including samples repeated so that all ranks get the same number
    full: int = 0  # in a full batch on the same number of ranks
    rank_sizes: tuple[int, ...] = ()  # per rank with samples; empty if all are equal
    repeated: int = 0  # at the end of this rank's samples, if it reads its own data
    is_last: bool = False

    def of_rank(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """Return a rank's total and distinct sample counts; repeated samples come last."""
        rank_sizes = self.rank_sizes or (self.padded // num_ranks,) * num_ranks
        if rank >= len(rank_sizes):
            return 0, 0
        new = min(max(self.samples - sum(rank_sizes[:rank]), 0), rank_sizes[rank])
        return rank_sizes[rank] + self.repeated, new


class LoopSamples(NamedTuple):
    """Number of samples that this rank received in a loop, and how many of them were repeated."""

    samples: int
    repeated: int


class LoaderLoop:
    """The state of a loop over a prepared loader at the loop's current batch."""

    def __init__(self, loader: Any = None) -> None:
        self.loader = loader
        self.batch = GlobalBatch()
        self.is_last = False  # whether the current batch is the last
        self.ended_loop: LoopSamples | None = None  # of the loop that ended during this batch
        self.number = 0  # of the current batch, from 1
        self._num_counted = 0  # batches before the current series of equal batches
        self._counted: LoopSamples | None = LoopSamples(0, 0)  # in these batches; None if unknown
        self.rows: set[int] = set()  # rows per sample in results gathered for full batches

    def begin_batch(self, batch: GlobalBatch) -> None:
        """Set the current batch, and mark this loop as the innermost loop."""
        if batch is not self.batch and batch != self.batch:
            self._counted, self._num_counted = self._count(), self.number
            self.batch = batch
        self.number += 1
        self.is_last, self.ended_loop = batch.is_last, None
        if not _loops or _loops[-1] is not self:
            self._leave()
            _loops.append(self)

    def end(self) -> None:
        self._leave()
        current_loop().ended_loop = self._count()

    def _leave(self) -> None:
        _loops[:] = [other for other in _loops if other is not self]

    def _count(self) -> LoopSamples | None:
        num_alike = self.number - self._num_counted
        if not num_alike or self._counted is None:
            return self._counted
        samples, new = self.batch.of_rank(*rank_and_size())
        is_in_between = new and (self._counted.repeated or (new < samples and num_alike > 1))
        if not samples or is_in_between:  # not all repeated samples are at the end
            return None
        all_of_it, repeated = self._counted
        return LoopSamples(all_of_it + num_alike * samples, repeated + num_alike * (samples - new))


_loops: list[LoaderLoop] = []  # from the outermost to the innermost
_NO_LOOP = LoaderLoop()


def current_loop() -> LoaderLoop:
    """Return the innermost loop over a prepared loader, or an empty loop if none is active."""
    return _loops[-1] if _loops else _NO_LOOP


def open_loops() -> list[LoaderLoop]:
    """Return the active loops, from the outermost to the innermost."""
    return [*_loops]
