"""Accelerate's shards: whole batches for every rank, filled up with samples from the beginning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from headway.errors import UsageError


class InvalidValueError(UsageError, ValueError):
    """A UsageError where Accelerate raises a ValueError."""


class BatchSamplerShard(BatchSampler):
    """The batches of a batch sampler that one rank gets, as many as every other rank.

    Args:
        batch_sampler: its batches are lists of indices; `batch_size` and `drop_last` are read
            from it where it has them.
        num_processes: the number of ranks.
        process_index: this rank.
        split_batches: every rank gets a part of each batch, not each num_processes-th batch.
        even_batches: fill the last batches of all ranks up with samples from the beginning. False
            gives what is left to the first ranks.

    Raises:
        InvalidValueError: a batch cannot be split into equal parts.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if split_batches:
            require_multiple(self.batch_size, num_processes)

    @property
    def total_length(self) -> int:
        """The number of batches of all ranks together."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        if self.split_batches:
            return self.total_length
        whole, rest = divmod(self.total_length, self.num_processes)
        if self.drop_last or not rest:
            return whole
        return whole + (self.even_batches or self.process_index < rest)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._parts() if self.split_batches else self._turns()

    def _parts(self) -> Iterator[list[Any]]:
        size = self.batch_size // self.num_processes
        mine = slice(self.process_index * size, (self.process_index + 1) * size)
        first: list[Any] = []
        batch: list[Any] = []
        for batch in self.batch_sampler:
            first = first or list(batch)
            if len(batch) == self.batch_size:
                yield batch[mine]
        if self.drop_last or not first or len(batch) >= self.batch_size:
            return
        if self.even_batches:
            batch = [*batch, *islice(cycle(first), self.batch_size)]
        if batch[mine]:
            yield batch[mine]

    def _turns(self) -> Iterator[list[Any]]:
        first: list[list[Any]] = []
        mine: list[Any] = []
        batch: list[Any] = []
        count = 0
        for count, batch in enumerate(self.batch_sampler, start=1):
            if count <= self.num_processes:
                first.append(batch)
            if (count - 1) % self.num_processes == self.process_index:
                mine = batch
            if count % self.num_processes == 0 and self._is_full(batch):
                yield mine
                mine = []
        if self.drop_last or not count:
            return
        if mine and (self._is_full(mine) or not self.even_batches):
            yield mine
        if self.even_batches:
            yield from self._filled_up(first, batch, count)

    def _filled_up(
        self, first: list[list[Any]], last: list[Any], count: int
    ) -> Iterator[list[Any]]:
        """Yield this rank's batch of the last round, if it is not a whole one of the script's."""
        start = count if self._is_full(last) else count - 1
        partial = [] if self._is_full(last) else last
        end = -(-count // self.num_processes) * self.num_processes
        whole_batches, samples = cycle(first), cycle(chain.from_iterable(first))
        for position in range(start, end):
            if self.batch_size is None:
                batch = next(whole_batches)
            else:
                batch = [*partial, *islice(samples, self.batch_size - len(partial))]
            partial = []
            if position % self.num_processes == self.process_index:
                yield batch

    def _is_full(self, batch: Sequence[Any]) -> bool:
        return self.batch_size is None or len(batch) == self.batch_size


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of a stream that one rank gets, as many as every other rank.

    Args:
        dataset: the stream; every rank reads all of it.
        batch_size: samples in a batch of one rank; with `split_batches` of all ranks.
        drop_last: leave the last round out if it is not whole, instead of filling it up with
            samples from the beginning.
        num_processes: the number of ranks.
        process_index: this rank.
        split_batches: every rank gets a part of each batch.

    Raises:
        InvalidValueError: a batch cannot be split into equal parts.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1:
            require_multiple(batch_size, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Number the next pass `epoch`, for the data set too."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self.batch_size * self.num_processes)
        return (whole + (rest > 0 and not self.drop_last)) * self.batch_size

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        size = self.batch_size // self.num_processes if self.split_batches else self.batch_size
        full = self.batch_size if self.split_batches else self.batch_size * self.num_processes
        mine = slice(self.process_index * size, (self.process_index + 1) * size)
        stream = iter(self.dataset)
        first: list[Any] = []
        while samples := list(islice(stream, full)):
            first = first or samples
            if len(samples) < full:
                if self.drop_last:
                    return
                samples = [*samples, *islice(cycle(first), full - len(samples))]
            yield from samples[mine]


def require_multiple(batch_size: int | None, num_processes: int) -> None:
    """Raise InvalidValueError unless batches can be split into equal parts."""
    if batch_size is None or batch_size % num_processes:
        raise InvalidValueError(
            f"split_batches=True, but batch_size {batch_size} is not a round multiple of"
            f" {num_processes} processes",
            where="the script's data loader",
            fix=f"give it a batch_size that is a multiple of {num_processes}",
        )
