"""Per-sample seeds, so that augmentation depends only on the seed, epoch and sample number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from headway.data.generators import (
    mixed,
    preserve_generators,
    restore_states,
    seed_generators,
    snapshot,
)
from headway.data.script_loaders import AttributeProxy, changed


class SeededIndices(NamedTuple):
    """The indices of a batch, or a single index, and the key from which seeds are derived."""

    samples: list[tuple[Any, int]]  # pairs of an index and its position in the epoch
    key: int  # derived from the seed and the epoch
    is_single: bool = False


class SampleSeeds:
    """Derives a seed for each sample from a seed, the epoch and the sample's position in it."""

    def __init__(self, seed: int, rank: int = 0) -> None:
        self.seed, self._rank = seed, rank  # 0 unless each rank reads its own data
        self.first_item = 0  # index of the first item of the next iteration over a stream
        # also read by persistent loader workers
        self._epoch = torch.zeros((), dtype=torch.int64)

    def seed_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a copy of `loader` that reseeds the generators for each sample."""
        if loader.num_workers:
            self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        if isinstance(loader.dataset, IterableDataset):
            return changed(loader, dataset=SeededStream(loader.dataset, self))
        samples = SeededSamples(loader.dataset, loader.collate_fn)
        return changed(loader, dataset=samples, collate_fn=identity)

    def begin_epoch(self, epoch: int, first_item: int) -> None:
        """Set the epoch and the first item of the next iteration."""
        self._epoch.fill_(epoch)
        self.first_item = first_item

    @property
    def key(self) -> int:
        """A hash of the seed, the epoch and the rank."""
        return mixed(self.seed, int(self._epoch), self._rank)


def numbered(drawn: Iterator[Any], *, is_batched: bool) -> Iterator[Any]:
    """Pair indices, or lists of indices, with their positions in the epoch."""
    numbers = count()
    if not is_batched:
        return zip(drawn, numbers, strict=False)
    return ([*zip(indices, numbers, strict=False)] for indices in drawn)


class _DatasetProxy(AttributeProxy):
    """Proxy for a dataset in loader workers."""

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._proxied, name, value)

    def __len__(self) -> int:
        return len(self._proxied)


class SeededSamples(_DatasetProxy, Dataset[Any]):
    """Loads and collates samples of a map-style dataset, and seeds the generators for each sample.

    Seeding starts with the first batch that draws random numbers. From then on, the generators are
    seeded for every sample, and `__getitems__` is called with one index at a time. The random draws
    of a collate function depend on the last sample of its batch.
    """

    _collate: Callable[[Any], Any]
    _is_random: bool | None  # None until the first batch is loaded

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        vars(self).update(_proxied=dataset, _collate=collate, _is_random=None)

    def __getitem__(self, drawn: SeededIndices) -> Any:
        if not self._is_random:
            with preserve_generators() if self._is_random is None else nullcontext():
                before = snapshot()
                indices = [index for index, _ in drawn.samples]
                batch = self._collated(self._load(indices, drawn.is_single), drawn)
                is_random = vars(self)["_is_random"] = snapshot() != before
                if is_random:
                    restore_states(before)
            if not is_random:
                return batch
        with preserve_generators():
            return self._collated([*self._seeded(drawn)], drawn)

    __getitems__ = __getitem__

    def _load(self, indices: list[Any], is_single: bool) -> Any:
        """Load samples as torch's fetcher does."""
        getitems = None if is_single else getattr(self._proxied, "__getitems__", None)
        return getitems(indices) if getitems else [self._proxied[index] for index in indices]

    def _seeded(self, drawn: SeededIndices) -> Iterator[Any]:
        for index, number in drawn.samples:
            seed_generators(mixed(drawn.key, number))
            yield self._load([index], drawn.is_single or isinstance(index, list))[0]

    def _collated(self, samples: Any, drawn: SeededIndices) -> Any:
        return self._collate(samples[0] if drawn.is_single else samples)


def identity(batch: Any) -> Any:
    return batch


class SeededStream(_DatasetProxy, IterableDataset[Any]):
    """Wraps a stream, and seeds the generators for each item by epoch, worker and item number."""

    _seeds: SampleSeeds

    def __init__(self, dataset: Any, seeds: SampleSeeds) -> None:
        vars(self).update(_proxied=dataset, _seeds=seeds)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        key = mixed(self._seeds.key, 0 if worker is None else worker.id)
        numbers = count(self._seeds.first_item)
        with preserve_generators():
            seed_generators(key)
            items = iter(self._proxied)
        for number in numbers:
            with preserve_generators():
                seed_generators(mixed(key, number))
                item = next(items, _END)
            if item is _END:
                return
            yield item


_END = object()
