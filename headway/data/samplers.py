"""Samplers that draw by a seed and an epoch alone, or leave the first batches out."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from headway.distributed.collectives import broadcast_object_list


class SeedableRandomSampler(RandomSampler):
    """A RandomSampler whose order depends on a seed and on the number of the pass only.

    Args:
        data_source, replacement, num_samples, generator: as for `torch.utils.data.RandomSampler`.
        data_seed: the seed of pass 0; each later pass adds 1. None: torch's initial seed.
    """

    def __init__(
        self,
        data_source: Any,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        *,
        data_seed: int | None = None,
    ) -> None:
        super().__init__(data_source, replacement, num_samples, generator)
        self.initial_seed = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator(device=torch.get_default_device())
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Number the next pass `epoch`."""
        self.epoch = epoch


class SkipBatchSampler(BatchSampler):
    """The batches of another batch sampler without the first ones, in every pass."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batch_sampler):
            if index >= self.skip_batches:
                yield batch

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)

    def __getattr__(self, name: str) -> Any:  # batch_size, drop_last, sampler, set_epoch, ...
        if name == "batch_sampler":  # copy and pickle ask before there are attributes
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    @property
    def total_length(self) -> int:
        """The number of batches with those that are left out."""
        return len(self.batch_sampler)


def draws_once(source: Any) -> bool:
    """Return whether a sampler or batch sampler is one of torch's that gives no index twice."""
    sampler: Any = source.sampler if type(source) is BatchSampler else source
    if type(sampler) in (RandomSampler, SeedableRandomSampler):
        is_whole = sampler.num_samples <= len(sampler.data_source)
        return is_whole and not sampler.replacement
    return type(sampler) in (SequentialSampler, SubsetRandomSampler)


def draws_all_at_first(source: Any) -> bool:
    """Return whether a sampler or batch sampler draws all of a pass before it gives an index."""
    sampler = source.sampler if type(source) is BatchSampler else source
    return draws_once(source) or type(sampler) is WeightedRandomSampler


def with_seedable_sampler(loader: DataLoader[Any], seed: int | None) -> DataLoader[Any]:
    """Return `loader` with a SeedableRandomSampler in place of a RandomSampler; itself without.

    Every rank must call this: without a `seed`, that of rank 0's torch holds for all.
    """
    if isinstance(loader.dataset, IterableDataset):
        return loader
    is_nested = isinstance(loader.sampler, BatchSampler)
    batches = loader.sampler if is_nested else loader.batch_sampler
    drawn_from = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if not isinstance(drawn_from, RandomSampler):
        return loader
    [agreed] = broadcast_object_list([torch.random.initial_seed() if seed is None else seed])
    seedable = SeedableRandomSampler(
        drawn_from.data_source,
        replacement=drawn_from.replacement,
        num_samples=drawn_from._num_samples,
        generator=drawn_from.generator,
        data_seed=agreed,
    )
    if batches is None:
        return changed(loader, sampler=seedable)
    batches = copy.copy(batches)
    batches.sampler = seedable  # type: ignore[union-attr]
    if is_nested:
        return changed(loader, sampler=batches)
    return changed(loader, batch_sampler=batches, sampler=seedable)


def changed(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a copy of `loader` with other attributes, also those that torch refuses to set."""
    other = copy.copy(loader)
    vars(other).update(attributes)
    return other
