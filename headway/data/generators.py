"""Save and restore the states of random generators, and seed the generators."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

_BITS = (1 << 64) - 1
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
        self.num_global = len(_GLOBAL[2 * only_torch :])  # the first of `all`

    def states(self) -> list[Any]:
        """Return the generators' states, for `restore`."""
        return [_state(rng) for rng in self.all]

    def restore(self, states: Iterable[Any]) -> None:
        """Restore the generators from states in the order that `states()` returns."""
        for rng, state in zip(self.all, states, strict=False):
            _set_state(rng, state)

    @contextmanager
    def seeded(self, seed: int, *numbers: int) -> Iterator[None]:
        """Seed each generator from `seed`, its index and `numbers`; restore all of them on exit."""
        before = self.states()
        for index, rng in enumerate(self.all):
            _seed(rng, mixed(mixed(seed, index), *numbers))
        try:
            yield
        finally:
            self.restore(before)


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


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restore the global generators on exit; in a loader worker, do nothing."""
    if get_worker_info() is not None:
        yield
        return
    states = [*map(_state, _GLOBAL)]
    try:
        yield
    finally:
        for rng, state in zip(_GLOBAL, states, strict=True):
            _set_state(rng, state)


def mixed(*numbers: int) -> int:
    """Hash a sequence of numbers to 64 bits."""
    result = 0  # SplitMix64: Steele, Lea and Flood, OOPSLA 2014
    for number in numbers:
        result = ((result ^ number) + 0x9E3779B97F4A7C15) & _BITS
        result = ((result ^ (result >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        result = ((result ^ (result >> 27)) * 0x94D049BB133111EB) & _BITS
        result ^= result >> 31
    return result


def snapshot() -> list[Any]:
    """Return the global generators' states, to be compared or restored; takes 5 us."""
    of_pythons = _bytes(_PYTHONS), _PYTHONS.gauss_next
    return [of_pythons, *map(_bytes, _GLOBAL[1:])]  # numpy's without its cached normal number


def restore_states(states: list[Any]) -> None:
    """Restore the global generators from a snapshot."""
    (pythons, normal), numpys, torchs = states
    position, *words = memoryview(pythons).cast("I")
    _PYTHONS.setstate((_PYTHONS.VERSION, (*words, position), normal))
    ctypes.memmove(_address(_NUMPYS), numpys, len(numpys))
    torch.default_generator.set_state(torch.frombuffer(bytearray(torchs), dtype=torch.uint8))


def _bytes(rng: Any) -> bytes:
    if isinstance(rng, torch.Generator):
        return rng.get_state().numpy().tobytes()
    if rng is _NUMPYS and type(rng._bit_generator) is not np.random.MT19937:
        return b""  # the script has replaced it
    return ctypes.string_at(_address(rng), _MT19937_BYTES)


def _address(rng: random.Random | np.random.RandomState) -> int:
    """Return the address of a generator's 624 words and position.

    For Python's generator this relies on CPython's `_random.Random`, which contains only the
    position and the words. They are only read, never written; `getstate()` would take 17 us.
    """
    if isinstance(rng, random.Random):
        return id(rng) + object.__basicsize__
    return int(rng._bit_generator.ctypes.state_address)
