"""Seeds of a loader's samples: random augmentation by a seed, the epoch and the sample's index."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from headway.data.position import Indices, Offset, Round, after, counts_samples
from headway.data.samplers import changed, draws_once
from headway.distributed.rng import generator_states, set_generator_states
from headway.errors import UsageError

_CPU = torch.device("cpu")
_BITS = (1 << 64) - 1


class Draw(NamedTuple):
    """An index that a sampler has drawn, with all that the sample's random numbers depend on."""

    index: Any
    key: int  # of the seed and the epoch
    times: int = 0  # how often the epoch has drawn the index before


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

    def begin_pass(self, epoch: int, samplers: Iterable[Any], first_item: int) -> None:
        """Let what these samplers draw, and the samples, belong to this epoch from now on."""
        self._epoch.fill_(epoch)
        self.first_item = first_item
        for number, sampler in enumerate(samplers):
            generator = getattr(sampler, "generator", None)
            if isinstance(generator, SeededGenerator):
                generator.manual_seed(mixed(self.key, number))

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    @property
    def key(self) -> int:
        """A number for the seed and the epoch."""
        return mixed(self.seed, self.epoch)

    def indices(self, loader: DataLoader[Any]) -> Indices:
        """Return the form that indices have for a loader that `seed_loader` made."""
        return _BatchesOfDraws(self) if loader.batch_sampler is not None else _Draws(self)


class _Draws(Indices):
    """Whatever a sampler gives is one index, and has its draw."""

    def __init__(self, seeds: SampleSeeds) -> None:
        self._seeds = seeds

    def to_load(self, given: Iterator[Any]) -> Iterator[Any]:
        key = self._seeds.key
        return (Draw(index, key) for index in given)

    def rounds_to_load(self, rounds: Iterator[Round]) -> Iterator[Round]:
        key = self._seeds.key
        return (one._replace(samples=_as_draws(one.samples, key)) for one in rounds)


class _BatchesOfDraws(_Draws):
    """Batches of indices, each of which has its draw."""

    def after(self, source: Any, taken: Offset, size: int = 0) -> tuple[Iterator[Any], list[Any]]:
        if draws_once(source):
            return after(source, taken, size)
        counted = _counted_samples if counts_samples(source) else _counted_batches
        return after(source, taken, size, partial(counted, key=self._seeds.key))

    def to_load(self, given: Iterator[Any]) -> Iterator[Any]:
        key = self._seeds.key
        return (_as_draws(indices, key) for indices in given)


def _as_draws(indices: list[Any], key: int) -> list[Draw]:
    return [one if type(one) is Draw else Draw(one, key) for one in indices]


def _counted_batches(batches: Iterator[Any], key: int) -> Iterator[list[Draw]]:
    times: Counter[int] = Counter()
    for batch in batches:
        yield [_counted_draw(index, key, times) for index in batch]


def _counted_samples(indices: Iterator[Any], key: int) -> Iterator[Draw]:
    times: Counter[int] = Counter()
    return (_counted_draw(index, key, times) for index in indices)


def _counted_draw(index: Any, key: int, times: Counter[int]) -> Draw:
    number = number_of(index)
    times[number] += 1
    return Draw(index, key, times[number] - 1)


class SeededGenerator(torch.Generator):
    """A sampler's generator that is seeded at the beginning of each epoch."""


def give_generators(samplers: Iterable[Any]) -> None:
    """Give a `SeededGenerator` to each of these that has a place for a generator, and none."""
    for sampler in samplers:
        if getattr(sampler, "generator", sampler) is None:
            sampler.generator = SeededGenerator()


class _Inside:
    """What stands for a data set in loader workers, with the attributes of that data set."""

    _dataset: Any

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # copy and pickle ask before there are attributes
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __len__(self) -> int:
        return len(self._dataset)


class DrawnIndices(_Inside, Dataset[Draw]):
    """Passes draws on to `SeededFetch`, which loads the samples."""

    def __init__(self, dataset: Any) -> None:
        vars(self)["_dataset"] = dataset

    def __getitem__(self, draw: Draw) -> Draw:
        return draw

    def __getitems__(self, draws: list[Draw]) -> list[Draw]:
        return draws


class SeededFetch:
    """Loads samples of a map data set, each with generators seeded for it, and collates them.

    What a collate function draws follows from the last sample of its batch. In the main process all
    generators are then put back. A data set with `__getitems__` gets lists of one index: what it
    draws for a sample must not depend on the other samples of a batch.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self._dataset, self._collate = dataset, collate
        get = getattr(dataset, "__getitems__", None)
        self._takes_lists = callable(get)

    def __call__(self, drawn: Draw | list[Draw]) -> Any:
        with _generators_kept():
            if isinstance(drawn, Draw):
                return self._collate(self._load(drawn))
            return self._collate([self._load(one) for one in drawn])

    def _load(self, draw: Draw) -> Any:
        seed_generators(mixed(draw.key, number_of(draw.index), draw.times))
        if self._takes_lists and not isinstance(draw.index, list):
            return self._dataset.__getitems__([draw.index])[0]
        return self._dataset[draw.index]


class SeededStream(_Inside, IterableDataset[Any]):
    """A stream that is seeded before each of its items, by the epoch, the worker and its number."""

    _seeds: SampleSeeds

    def __init__(self, dataset: Any, seeds: SampleSeeds) -> None:
        vars(self).update(_dataset=dataset, _seeds=seeds)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        key = mixed(self._seeds.key, 0 if worker is None else worker.id)
        numbers = count(self._seeds.first_item)
        with _generators_kept():
            seed_generators(key)
            items = iter(self._dataset)
        for number in numbers:
            with _generators_kept():
                seed_generators(mixed(key, number))
                item = next(items, _END)
            if item is _END:
                return
            yield item


_END = object()


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Put the main process's generators back after the block; those of a worker stay."""
    if get_worker_info() is not None:
        yield
        return
    states = generator_states(_CPU)
    try:
        yield
    finally:
        set_generator_states(states, _CPU)


def seed_generators(number: int) -> None:
    """Seed Python's, numpy's and torch's CPU generator with parts of a number of 64 bits.

    `torch.manual_seed` would also look after the generators of devices, at 75 us a call.
    """
    random.seed(number)
    torch.default_generator.manual_seed(number)  # uses the lower 32 bits
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number >> 32)


def mixed(*numbers: int) -> int:
    """Return a number of 64 bits that depends on all bits of these, and on their order.

    Each is mixed in by the function of SplitMix64 (Steele, Lea and Flood, Fast Splittable
    Pseudorandom Number Generators, OOPSLA 2014).
    """
    result = 0
    for number in numbers:
        result = ((result ^ number) + 0x9E3779B97F4A7C15) & _BITS
        result = ((result ^ (result >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        result = ((result ^ (result >> 27)) * 0x94D049BB133111EB) & _BITS
        result ^= result >> 31
    return result


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
