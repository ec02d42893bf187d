"""Divides global batches among the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain, cycle, islice
from typing import Any, NamedTuple

import torch

from headway.data.active_loader import GlobalBatch
from headway.distributed.nested import leaves


class ShardedBatch(NamedTuple):
    """The samples (or indices) of a global batch, and each rank's slice of them."""

    samples: list[Any]
    slices: tuple[slice, ...]  # trailing ranks without samples have no slice
    batch: GlobalBatch


class Division(NamedTuple):
    """Divides global batches among the ranks, and selects the parts that this rank reads."""

    num_ranks: int = 1
    rank: int = 0
    even: bool = True  # see `DataLoaderConfiguration.even_batches`
    reads_all: bool = False  # this rank reads the parts of all ranks
    is_presharded: bool = False  # each rank reads its own data

    @property
    def own(self) -> slice:
        """Selects the parts that this rank reads; there may be none."""
        return slice(None) if self.reads_all else slice(self.rank, self.rank + 1)

    def num_rounds(self, items: int, per_round: int, drop_last: bool) -> int:
        """Return the number of rounds in which this rank gets a part of `items` items."""
        whole, rest = divmod(items, per_round)
        if drop_last or not rest:
            return whole
        first = 0 if self.even else self.rank * -(-per_round // self.num_ranks)
        return whole + (first < rest)

    def of_batches(self, batches: Sequence[list[Any]], size: int) -> ShardedBatch:
        """Divide a round of batches with `size` samples each; 0 means that the sizes vary."""
        samples = list(chain.from_iterable(batches))
        if self.even and (size or len(batches) < self.num_ranks):
            return self.of_samples(samples, size * self.num_ranks)
        sizes = tuple(map(len, batches))
        return ShardedBatch(samples, *_cut(sizes, self.num_ranks, len(samples), size * len(sizes)))

    def of_samples(self, samples: list[Any], full: int) -> ShardedBatch:
        """Divide a round of samples; a full round has `full` samples."""
        slices, batch = _divided(len(samples), self.num_ranks, full, self.even)
        if batch.padded > batch.samples:  # repeat the first samples
            samples = samples + list(islice(cycle(samples), batch.padded - batch.samples))
        return ShardedBatch(samples, slices, batch)


@lru_cache(maxsize=64)  # nearly all rounds have the same size
def _divided(
    samples: int, num_ranks: int, full: int, even: bool
) -> tuple[tuple[slice, ...], GlobalBatch]:
    """Divide evenly, or assign each rank in turn its part of a full round while samples remain."""
    if even:
        return _cut((-(-samples // num_ranks),) * num_ranks, num_ranks, samples, full)
    size = -(-full // num_ranks)
    sizes = tuple(min(size, samples - start) for start in range(0, samples, size))
    return _cut(sizes, num_ranks, samples, size * len(sizes))


def _cut(
    sizes: tuple[int, ...], num_ranks: int, samples: int, full: int
) -> tuple[tuple[slice, ...], GlobalBatch]:
    """Return slices of these sizes, and their global batch with `samples` distinct samples."""
    ends = accumulate(sizes)
    slices = tuple(slice(end - size, end) for size, end in zip(sizes, ends, strict=True))
    is_even = len(sizes) == num_ranks and len({*sizes}) == 1
    return slices, GlobalBatch(samples, sum(sizes), full, () if is_even else sizes)


def samples_in(batch: Any) -> int:
    """Return the length of the first non-empty tensor in `batch`; 0 if there is none."""
    if type(batch) in (tuple, list) and batch:  # the common case: called in every step
        first = batch[0]
        if type(first) is torch.Tensor and (shape := first.shape) and (length := shape[0]):
            return length
    tensors = (leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim)
    return next((len(tensor) for tensor in tensors if len(tensor)), 0)
