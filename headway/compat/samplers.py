"""Accelerate's samplers: shards of batch samplers and streams, and seeded shuffling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from headway.errors import Code, UsageError


@dataclass(eq=False)
class BatchSamplerShard(BatchSampler):
    """One rank's shard of a batch sampler, with the same number of batches on all ranks.

    Args:
        batch_sampler: Yields lists of indices; its `batch_size` and `drop_last` are used if
            present.
        num_processes: Number of ranks.
        process_index: This rank.
        split_batches: Take a part of each batch instead of every num_processes-th batch.
        even_batches: Pad the last batches with samples from the start. If False, only the first
            ranks get the remaining batches.

    Raises:
        UsageError: A batch cannot be split into equal parts.
    """

    batch_sampler: Any
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False
    even_batches: bool = True

    def __post_init__(self) -> None:
        self.sampler: Any = getattr(self.batch_sampler, "sampler", None)
        self.batch_size: Any = getattr(self.batch_sampler, "batch_size", None)
        self.drop_last = getattr(self.batch_sampler, "drop_last", False)
        if self.split_batches:
            require_multiple(self.batch_size, self.num_processes)

    @property
    def total_length(self) -> int:
        """The number of batches over all ranks."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        whole, rest = divmod(self.total_length, 1 if self.split_batches else self.num_processes)
        if self.drop_last or not rest:
            return whole
        return whole + (self.even_batches or self.process_index < rest)

    def __iter__(self) -> Iterator[list[Any]]:
        num_batches = 1 if self.split_batches else self.num_processes
        rounds = _rounds(self.batch_sampler, num_batches)
        if self.batch_size is None:  # variable batch sizes
            return chain.from_iterable(_parts(rounds, num_batches, self, self.even_batches))
        samples = ([*chain.from_iterable(batches)] for batches in rounds)
        return _parts(samples, self.batch_size * num_batches, self, self.even_batches)


@dataclass(eq=False)
class IterableDatasetShard(IterableDataset[Any]):
    """One rank's shard of a stream, with the same number of samples on all ranks.

    Args:
        dataset: The stream; each rank reads all of it.
        batch_size: Batch size per rank or, with `split_batches`, over all ranks.
        drop_last: Drop an incomplete last round instead of padding it with samples from the
            start.
        num_processes: Number of ranks.
        process_index: This rank.
        split_batches: Take a part of each batch.

    Raises:
        UsageError: A batch cannot be split into equal parts.
    """

    dataset: Any
    batch_size: int = 1
    drop_last: bool = False
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False

    def __post_init__(self) -> None:
        self.epoch = 0
        if self.split_batches and self.batch_size > 1:
            require_multiple(self.batch_size, self.num_processes)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch number for the next iteration and the dataset."""
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
        full = self.batch_size if self.split_batches else self.batch_size * self.num_processes
        return chain.from_iterable(_parts(_rounds(self.dataset, full), full, self, even=True))


def _rounds(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    return iter(lambda: list(islice(rest, size)), [])


def _parts(rounds: Iterable[list[Any]], full: int, shard: Any, even: bool) -> Iterator[list[Any]]:
    """Yield the shard's part of each round; a complete round has `full` items."""
    size, first = full // shard.num_processes, list[Any]()
    for items in rounds:
        first = first or items
        if len(items) < full:
            if shard.drop_last:
                continue
            if even:
                items = [*items, *islice(cycle(first), full - len(items))]
        if part := items[shard.process_index * size : (shard.process_index + 1) * size]:
            yield part


def require_multiple(batch_size: int | None, num_processes: int) -> None:
    """Raise UsageError unless batches can be split into equal parts."""
    if batch_size is None or batch_size % num_processes:
        raise UsageError(
            f"split_batches=True, but batch_size {batch_size} is not a multiple of the number of"
            f" processes, {num_processes}",
            where="the script's data loader",
            fix=f"set the loader's batch_size to a multiple of {num_processes}",
            code=Code.BATCH_SIZE,
        )


class SeedableRandomSampler(RandomSampler):
    """A RandomSampler whose order depends only on a seed and the epoch.

    Args:
        data_source, replacement, num_samples, generator: See `torch.utils.data.RandomSampler`.
        data_seed: Seed of epoch 0; each later epoch adds 1. Defaults to torch's initial seed.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator(device=torch.get_default_device())
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for the next iteration."""
        self.epoch = epoch
