"""Draws the sample order: in the first epoch as torch does, then from the seed and the epoch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, count, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch.utils.data import BatchSampler, DataLoader

from headway.data.active_loader import LOOP
from headway.data.generators import Generators, SampleSeeds, SeededIndices, identity
from headway.data.script_loaders import samplers_of, source_of
from headway.distributed.call_barrier import named_call
from headway.distributed.collectives import broadcast_object_list

if TYPE_CHECKING:
    from headway.data.loader_set import LoaderIteration

_END = object()


class Draws:
    """The random draws made while reading a loader.

    The first iteration draws from the script's generators, set to rank 0's states. These states
    also seed all later draws. Later draws leave the generators unchanged, including those of
    `owners`. `is_alike` means that all ranks draw the same.
    """

    counts_samples = False  # whether batches are consecutive samples of a torch sampler

    def __init__(
        self, owners: Iterable[Any], is_alike: bool, *, only_torch: bool, seed: int | None
    ) -> None:
        self.generators = Generators(owners, only_torch=only_torch)
        self.seed = seed
        self._is_alike = is_alike

    @contextmanager
    def at_start(self, iteration: LoaderIteration) -> Iterator[None]:
        """Set the generators to their states at the start of an epoch; restore them on exit.

        In a first iteration that is not resumed, rank 0's generators keep the advanced states.
        """
        generators, before = self.generators, self.generators.states()
        if iteration.is_new:
            iteration.first = self.begin_first(before)
        if iteration.first is None:
            generators.seed(self.seed or 0, iteration.start.epoch, 0)
        else:
            generators.restore(iteration.first)
        try:
            yield
        finally:
            if not iteration.is_new or self.seed != generators.seed_of(before):
                generators.restore(before)

    def begin_first(self, states: list[Any]) -> list[Any]:
        """Derive the seed from rank 0's generator states, and return these."""
        if self._is_alike:
            with named_call(LOOP):
                [states] = broadcast_object_list([states])
        self.seed = self.generators.seed_of(states)
        return states

    def each(self, items: Iterator[Any], epoch: int, number: int) -> Iterator[Any]:
        """Yield items, and seed the generators for each of them."""
        for each in count(number):
            with self.generators.preserved():
                self.generators.seed(self.seed or 0, epoch, each)
                item = next(items, _END)
            if item is _END:
                return
            yield item


class SampleOrder(Draws):
    """Draws the indices of a map-style dataset, which are the same on all ranks.

    torch's samplers draw from generators when an iteration starts. Other samplers may draw at any
    time, so the generators are seeded for each of their batches except the first.
    """

    def __init__(
        self, loader: DataLoader[Any], is_alike: bool, seed: int | None, seeds: SampleSeeds | None
    ) -> None:
        self.source: Any = source_of(loader)  # the batch sampler, or the sampler if there is none
        samplers = samplers_of(loader)
        modules = [type(sampler).__module__ for sampler in samplers]
        self.is_torchs = all(module.startswith("torch.utils.data") for module in modules)
        super().__init__(samplers, is_alike, only_torch=self.is_torchs, seed=seed)
        own = (getattr(sampler, "generator", None) for sampler in samplers)
        # with their own generator, torch's samplers also draw later
        self._draws_later = self.is_torchs and any(isinstance(rng, torch.Generator) for rng in own)
        is_batched = self.is_batched = loader.batch_sampler is not None
        # without a batch sampler each of the sampler's items is a batch
        self.yields_lists = is_batched or isinstance(self.source, BatchSampler)
        self.counts_samples = self.is_torchs and type(self.source) is BatchSampler
        self._samples = seeds

    def draw(self, iteration: LoaderIteration) -> Iterator[list[Any]]:
        """Return the remaining batches; those of custom samplers add to `iteration.sums`.

        With seeds, a batch contains pairs of an index and its position in the epoch.
        """
        taken, source, numbers = iteration.start.taken, self.source, count()
        if self.counts_samples and taken:  # the batch size may have changed
            rest: Any = islice(self._drawn(source.sampler, iteration), taken, None)
            batches: Iterator[Any] = iter(BatchSampler(rest, source.batch_size, source.drop_last))
            taken, numbers = 0, count(taken)
        else:
            batches = self._drawn(source, iteration)
        if not self.yields_lists:
            batches = ([index] for index in batches)
        if self._samples is not None:
            batches = ([*zip(indices, numbers, strict=False)] for indices in batches)
        for _ in islice(batches, taken // iteration.owner.unit):
            pass
        iteration.compare_reread()
        return batches

    def loading(self) -> Callable[[list[Any]], Any]:
        """Return a function that converts a drawn batch to what the dataset loads."""
        if self._samples is None:
            return identity if self.yields_lists else itemgetter(0)
        key, is_single = self._samples.key, not self.is_batched
        if is_single and self.yields_lists:  # each list is a single index of the dataset
            return lambda drawn: SeededIndices([([i for i, _ in drawn], drawn[0][1])], key, True)
        return lambda drawn: SeededIndices(drawn, key, is_single)

    def single(self, index: int) -> list[Any]:
        """Return a batch of a single sample, as `draw` does."""
        return [index if self._samples is None else (index, 0)]

    def _drawn(self, source: Iterable[Any], iteration: LoaderIteration) -> Iterator[Any]:
        """Iterate over a source from the start of the epoch, with its generators' states."""
        with self.at_start(iteration):
            items = iter([*source] if self._draws_later else source)
            first = [*islice(items, 1)]
        if self.is_torchs:
            return chain(first, items)
        return _summed(chain(first, self.each(items, iteration.start.epoch, 1)), iteration.sums)


def _summed(batches: Iterator[Any], sums: array[int]) -> Iterator[Any]:
    total = 0
    for batch in batches:
        total = crc32(repr(batch).encode(errors="backslashreplace"), total)
        sums.append(total)
        yield batch
