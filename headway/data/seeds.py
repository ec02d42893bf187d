"""Seeds of a loader's samples: random augmentation by a seed, the epoch and the sample's index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from headway.data.generators import generators_kept, mixed, put_back, seed_generators, snapshot
from headway.data.samplers import StandIn, changed, draws_once
from headway.errors import UsageError

_BITS = (1 << 64) - 1


class Again(NamedTuple):
    """An index that the epoch has drawn before, `times` times."""

    index: Any
    times: int


class Drawn(NamedTuple):
    """The indices of a batch, or a single one, and what random numbers of all depend on."""

    indices: list[Any]
    key: int  # of the seed and the epoch
    is_single: bool = False


class SampleSeeds:
    """Seeds for every sample of a loader, by a seed, the epoch and the sample's index.

    `first_item` is the number of the item with which the next pass over a stream begins.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.first_item = 0
        # loader workers that live for several epochs read it, too
        self._epoch = torch.zeros((), dtype=torch.int64)

    def seed_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader like this one, whose data set is seeded anew for each sample."""
        if loader.num_workers:
            self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        if isinstance(loader.dataset, IterableDataset):
            return changed(loader, dataset=SeededStream(loader.dataset, self))
        fetch = SeededFetch(loader.dataset, loader.collate_fn)
        return changed(loader, dataset=DrawnIndices(loader.dataset), collate_fn=fetch)

    def begin_pass(self, epoch: int, first_item: int) -> None:
        """Number the epoch of the samples from now on."""
        self._epoch.fill_(epoch)
        self.first_item = first_item

    @property
    def key(self) -> int:
        """A number for the seed and the epoch."""
        return mixed(self.seed, int(self._epoch))


def counted(drawn: Iterator[Any], source: Any, *, is_batched: bool) -> Iterator[Any]:
    """Yield indices, or lists of them, with how often each was drawn before, if any may be."""
    if draws_once(source):
        return drawn
    times = Counter[int]()

    def count_one(index: Any) -> Any:
        number = number_of(index)
        times[number] += 1
        return Again(index, times[number] - 1) if times[number] > 1 else index

    return ([*map(count_one, one)] if is_batched else count_one(one) for one in drawn)


class _Inside(StandIn):
    """What stands for a data set in loader workers."""

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inside, name, value)

    def __len__(self) -> int:
        return len(self._inside)


class DrawnIndices(_Inside, Dataset[Drawn]):
    """Passes indices on to `SeededFetch`, which loads the samples."""

    def __init__(self, dataset: Any) -> None:
        vars(self)["_inside"] = dataset

    def __getitem__(self, drawn: Drawn) -> Drawn:
        return drawn

    __getitems__ = __getitem__


class SeededFetch:
    """Loads samples of a map data set, each with generators seeded for it, and collates them.

    Only where they are drawn from: a batch that has drawn nothing needs no seeds, and after the
    first one that has, every sample is seeded. What a collate function draws follows from the last
    sample of its batch. In the main process all generators are then put back. A data set with
    `__getitems__` gets lists of one index: what it draws for a sample must not depend on the other
    samples of a batch.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self._dataset, self._collate = dataset, collate
        self._getitems = getattr(dataset, "__getitems__", None)
        self._is_random: bool | None = None  # until the first batch is loaded

    def __call__(self, drawn: Drawn) -> Any:
        if not self._is_random:
            with generators_kept() if self._is_random is None else nullcontext():
                before = snapshot()
                batch = self._collated(self._load_plainly(drawn), drawn)
                self._is_random = snapshot() != before
                if self._is_random:
                    put_back(before)
            if not self._is_random:
                return batch
        with generators_kept():
            return self._collated([self._load(one, drawn.key) for one in drawn.indices], drawn)

    def _load_plainly(self, drawn: Drawn) -> Any:
        """Load as torch does."""
        indices = [one.index if type(one) is Again else one for one in drawn.indices]
        if callable(self._getitems) and not drawn.is_single:
            return self._getitems(indices)
        return [self._dataset[one] for one in indices]

    def _load(self, drawn: Any, key: int) -> Any:
        index, times = drawn if type(drawn) is Again else (drawn, 0)
        seed_generators(mixed(key, number_of(index), times))
        if callable(self._getitems) and not isinstance(index, list):
            return self._getitems([index])[0]
        return self._dataset[index]

    def _collated(self, samples: Any, drawn: Drawn) -> Any:
        return self._collate(samples[0] if drawn.is_single else samples)


class SeededStream(_Inside, IterableDataset[Any]):
    """A stream that is seeded before each of its items, by the epoch, the worker and its number."""

    _seeds: SampleSeeds

    def __init__(self, dataset: Any, seeds: SampleSeeds) -> None:
        vars(self).update(_inside=dataset, _seeds=seeds)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        key = mixed(self._seeds.key, 0 if worker is None else worker.id)
        numbers = count(self._seeds.first_item)
        with generators_kept():
            seed_generators(key)
            items = iter(self._inside)
        for number in numbers:
            with generators_kept():
                seed_generators(mixed(key, number))
                item = next(items, _END)
            if item is _END:
                return
            yield item


_END = object()


def number_of(index: Any) -> int:
    """Return a number for an index (number, text, or list of these), the same in every process."""
    if type(index) is int:
        return index & _BITS
    if hasattr(index, "__index__"):  # numpy's numbers, and tensors of one
        return int(index.__index__()) & _BITS
    return crc32(repr(_plain(index)).encode())


def _plain(index: Any) -> Any:
    if isinstance(index, (list, tuple)):
        return [_plain(one) for one in index]
    if index is None or isinstance(index, (str, bytes, float)):
        return index
    if hasattr(index, "__index__"):
        return int(index.__index__())
    raise UsageError(
        f"seed= cannot tell samples apart by indices of the type {type(index).__name__}",
        where="the sampler of a prepared DataLoader",
        fix="let the sampler give numbers, strings, or tuples of these",
    )
