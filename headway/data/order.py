"""The order of samples: drawn as torch does at first, later by the seed and the epoch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from hashlib import blake2b
from itertools import chain, count, islice
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch.utils.data import BatchSampler, DataLoader

from headway.data.division import Offset
from headway.data.generators import Generators
from headway.data.script_loaders import source_of
from headway.data.seeds import Drawn, SampleSeeds, numbered

_END = object()
Agree = Callable[[list[Any]], list[Any]]


class Place(NamedTuple):
    """Where a pass begins: the epoch whose samples it gives, and what it leaves out."""

    epoch: int = 0
    taken: Offset = Offset()
    checksum: int = 0  # of what was taken
    # the generators, as they drew the loader's first pass; None: draws follow from seed and epoch
    first: Sequence[Any] | None = None
    stream: Any = None  # the state of the data set after what was taken
    is_new: bool = False  # this is the first pass
    depth: int = 0  # how many passes over the loader were open when its epoch began
    before: tuple[int, int, Any] | None = None  # batches of the last epoch, checksum, its `first`


def _number_of(states: Iterable[Any]) -> int:
    """Return a number of 64 bits for the states of generators."""
    number = blake2b(digest_size=8)
    for state in states:
        is_tensor = isinstance(state, torch.Tensor)
        number.update(state.numpy().tobytes() if is_tensor else repr(state).encode())
    return int.from_bytes(number.digest(), "big")


class Draws:
    """The random numbers that reading a loader takes.

    The first pass takes them from the script's generators, as they are on rank 0. Their states then
    are the seed for all other draws, before and after which the generators are the same, those of
    `owners` among them. `agree` returns the states that rank 0 has.
    """

    counts_samples = False  # whether batches are consecutive samples of a sampler of torch's

    def __init__(
        self, owners: Iterable[Any], agree: Agree, *, only_torch: bool, seed: int | None
    ) -> None:
        self.generators = Generators(owners, only_torch=only_torch)
        self.seed = seed
        self.first: Sequence[Any] | None = None  # the states of the first pass, once it is drawn
        self._agree = agree

    def at(self, place: Place, number: int) -> AbstractContextManager[None]:
        """Set the generators to draw something in the block, the n-th of a pass; put them back."""
        if number or (place.first is None and not place.is_new):
            return self.generators.seeded(self.seed or 0, place.epoch, number)
        return self._as_first(place)

    @contextmanager
    def _as_first(self, place: Place) -> Iterator[None]:
        """Draw a first pass in the block: one that is new leaves rank 0's generators moved."""
        before = self.generators.states()
        first = self.begin_first(before) if place.is_new else place.first
        is_own = place.is_new and self.seed == _number_of(before)
        if not is_own:
            self.generators.restore(first or ())
        try:
            yield
        finally:
            if not is_own:
                self.generators.restore(before)

    def begin_first(self, states: list[Any]) -> Sequence[Any]:
        """Note the states of generators on rank 0 as those of the first pass."""
        self.first = first = self._agree(states)
        self.seed = _number_of(first)
        return first

    def each(self, items: Iterator[Any], place: Place, number: int) -> Iterator[Any]:
        """Yield items, each of which is drawn with generators that are seeded for it."""
        place = place._replace(first=None, is_new=False)
        for each in count(number):
            with self.at(place, each):
                item = next(items, _END)
            if item is _END:
                return
            yield item


class SampleOrder(Draws):
    """Draws the indices of a map data set, the same on all ranks.

    torch's samplers draw from generators when a pass begins. Any other may draw at any time: each
    of its batches is drawn with generators that are seeded for it, but for the very first.
    """

    def __init__(
        self, loader: DataLoader[Any], agree: Agree, seed: int | None, samples: SampleSeeds | None
    ) -> None:
        self.source: Any = source_of(loader)  # the batch sampler, or else the sampler
        inner = getattr(self.source, "sampler", None)
        samplers = [self.source] if inner is None else [self.source, inner]
        modules = [type(sampler).__module__ for sampler in samplers]
        self.is_torchs = all(module.startswith("torch.utils.data") for module in modules)
        super().__init__(samplers, agree, only_torch=self.is_torchs, seed=seed)
        own = (getattr(sampler, "generator", None) for sampler in samplers)
        # with one of their own, torch's samplers also draw while they go on
        self._draws_on = self.is_torchs and any(isinstance(rng, torch.Generator) for rng in own)
        is_batched = self.is_batched = loader.batch_sampler is not None
        # without a batch sampler each of the sampler's items is a batch
        self.gives_lists = is_batched or isinstance(self.source, BatchSampler)
        self.counts_samples = self.is_torchs and type(self.source) is BatchSampler
        self._samples = samples

    def draw(self, place: Place, sums: array[int], num_batches: int = 1) -> Iterator[Any]:
        """Return the batches after those taken; where samples are counted, `num_batches` in one.

        `sums` gets a number for the batches up to each, if the sampler is not one of torch's.
        """
        taken, seeds, source = place.taken, self._samples, self.source
        if self.counts_samples and (taken.samples or num_batches > 1):
            samples = self._drawn(source.sampler, place)
            if seeds is not None:
                samples = numbered(samples, is_batched=False)
            rest: Any = islice(samples, taken.samples, None)
            return iter(BatchSampler(rest, num_batches * source.batch_size, source.drop_last))
        batches = self._drawn(source, place)
        if not self.is_torchs:
            batches = _summed(batches, sums)
        if seeds is not None:
            batches = numbered(batches, is_batched=self.gives_lists)
        return islice(batches, taken.batches, None)

    def loading(self) -> Callable[[Any], Any] | None:
        """Return what gives indices the form that the data set needs; None: as they are."""
        if self._samples is None:
            return None
        key = self._samples.key
        if self.is_batched:
            return lambda drawn: Drawn(drawn, key)
        if self.gives_lists:  # each is one index of the data set
            return lambda drawn: Drawn([([index for index, _ in drawn], drawn[0][1])], key, True)
        return lambda drawn: Drawn([drawn], key, True)

    def _drawn(self, source: Iterable[Any], place: Place) -> Iterator[Any]:
        """Return what a source gives, drawn with the generators of the place."""
        with self.at(place, 0):
            items = iter([*source] if self._draws_on else source)
            first = [*islice(items, 1)]
        return chain(first, items if self.is_torchs else self.each(items, place, 1))


def _summed(batches: Iterator[Any], sums: array[int]) -> Iterator[Any]:
    total = 0
    for batch in batches:
        total = crc32(repr(batch).encode(errors="backslashreplace"), total)
        sums.append(total)
        yield batch
