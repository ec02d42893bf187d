"""Save, restore and seed random generators; with a seed, for each sample of a loader.

The augmentation of a sample then depends only on the seed, the epoch and its number.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b
from itertools import chain, count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from headway.data.script_loaders import AttributeProxy, changed

_KINDS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
_PYTHONS: Any = random._inst
_NUMPYS: Any = np.random.mtrand._rand
_GLOBAL = (_PYTHONS, _NUMPYS, torch.default_generator)
_MT19937_BYTES = 4 * (624 + 1)


class Generators:
    """The global random generators, and the generators that are attributes of `owners`."""

    def __init__(self, owners: Iterable[Any], *, only_torch: bool) -> None:
        values = chain.from_iterable(
            vars(owner).values() for owner in owners if hasattr(owner, "__dict__")
        )
        kinds = torch.Generator if only_torch else _KINDS
        found = [*_GLOBAL[2 * only_torch :], *(rng for rng in values if isinstance(rng, kinds))]
        self.all: list[Any] = [*{id(rng): rng for rng in found}.values()]
        self._num_global = len(_GLOBAL[2 * only_torch :])  # the first of `all`

    def states(self) -> list[Any]:
        """Return the generators' states, for `restore`."""
        return [_state(rng) for rng in self.all]

    def restore(self, states: Iterable[Any]) -> None:
        """Restore the generators from states in the order that `states()` returns."""
        for rng, state in zip(self.all, states, strict=False):
            _set_state(rng, state)

    def seed_of(self, states: list[Any]) -> int:
        """Hash states; those of global generators only if the owners have no generators."""
        return mixed(*(states[self._num_global :] or states))

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore all generators on exit."""
        states = self.states()
        try:
            yield
        finally:
            self.restore(states)

    def seed(self, seed: int, *numbers: int) -> None:
        """Seed each generator from `seed`, its index and `numbers`."""
        for index, rng in enumerate(self.all):
            _seed(rng, mixed(seed, index, *numbers))


def _state(rng: Any) -> Any:
    if isinstance(rng, (torch.Generator, np.random.RandomState)):
        return rng.get_state()
    return rng.getstate() if isinstance(rng, random.Random) else rng.bit_generator.state


def _set_state(rng: Any, state: Any) -> None:
    if isinstance(rng, (torch.Generator, np.random.RandomState)):
        rng.set_state(state)
    elif isinstance(rng, random.Random):
        rng.setstate(state)
    else:
        rng.bit_generator.state = state


def _seed(rng: Any, number: int) -> None:
    if isinstance(rng, torch.Generator):
        rng.manual_seed(number)
    elif isinstance(rng, random.Random):
        rng.seed(number)
    elif isinstance(rng, np.random.RandomState):
        rng.seed(number & 0xFFFFFFFF)
    else:
        rng.bit_generator.state = type(rng.bit_generator)(number).state


def seed_generators(number: int) -> None:
    """Seed Python's, numpy's and torch's CPU generators from a 64-bit number."""
    random.seed(number)
    # uses the lower 32 bits; torch.manual_seed would take 75 us for the device generators
    torch.default_generator.manual_seed(number)
    np.random.seed(number >> 32)


def preserve_generators() -> AbstractContextManager[None]:
    """Restore the global generators on exit; in a loader worker, do nothing."""
    return nullcontext() if get_worker_info() else Generators((), only_torch=False).preserved()


def mixed(*values: Any) -> int:
    """Hash numbers and generator states to 64 bits."""
    hashed = blake2b(digest_size=8)
    for value in values:
        is_tensor = isinstance(value, torch.Tensor)
        hashed.update(value.numpy().tobytes() if is_tensor else f"{value},".encode())
    return int.from_bytes(hashed.digest(), "big")


def snapshot() -> list[Any]:
    """Return the global generators' states, to be compared or restored; takes 5 us.

    numpy's cached normal number is not included. The state of Python's generator is read from the
    memory of CPython's `_random.Random`, which contains only a position and 624 words; `getstate()`
    would take 17 us.
    """
    pythons = ctypes.string_at(id(_PYTHONS) + object.__basicsize__, _MT19937_BYTES)
    bits, numpys = _NUMPYS._bit_generator, b""
    if type(bits) is np.random.MT19937:  # the script has not replaced it
        numpys = ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)
    torchs = torch.default_generator.get_state().numpy().tobytes()
    return [(pythons, _PYTHONS.gauss_next), numpys, torchs]


def restore_states(states: list[Any]) -> None:
    """Restore the global generators from a snapshot."""
    (pythons, normal), numpys, torchs = states
    position, *words = memoryview(pythons).cast("I")
    _PYTHONS.setstate((_PYTHONS.VERSION, (*words, position), normal))
    ctypes.memmove(_NUMPYS._bit_generator.ctypes.state_address, numpys, len(numpys))
    torch.default_generator.set_state(torch.frombuffer(bytearray(torchs), dtype=torch.uint8))


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
