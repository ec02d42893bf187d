"""Divides global batches among the ranks; sources read a rank's part, or receive it from rank 0."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, chain, count, cycle, islice
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from headway.data.active_loader import LOOP, GlobalBatch
from headway.data.generators import identity, preserve_generators
from headway.data.loader_set import LoaderIteration
from headway.data.order import Draws, SampleOrder
from headway.data.script_loaders import (
    batch_size_of,
    changed,
    distributed_sampler_of,
    is_plain,
    len_of,
    num_repeats,
)
from headway.distributed.call_barrier import call_barrier, has_real_ranks
from headway.distributed.nested import checksum_of, for_each_tensor, leaves
from headway.errors import Code, UsageError
from headway.ipc.stderr import named

Item = tuple[Any, GlobalBatch]  # this rank's batch, and the global batch
_Parts = tuple[list[Any], GlobalBatch]  # the batches that this rank reads, for any ranks
_Read = tuple[list[Any], GlobalBatch, int]  # and a checksum of the samples that all ranks read
# the samples (or indices) of a global batch, and each rank's slice of them; trailing ranks without
# samples have no slice
_Divided = tuple[list[Any], tuple[slice, ...], GlobalBatch]


class Division(NamedTuple):
    """Divides global batches among the ranks, and selects the parts that this rank reads."""

    num_ranks: int = 1
    rank: int = 0
    even: bool = True  # see `DataLoaderConfiguration.even_batches`
    reads_all: bool = False  # this rank reads the parts of all ranks
    is_presharded: bool = False  # each rank reads its own data

    @property
    def own(self) -> slice:
        """Selects the parts that this rank reads; there may be none."""
        return slice(None) if self.reads_all else slice(self.rank, self.rank + 1)

    def num_rounds(self, items: int, per_round: int, drop_last: bool) -> int:
        """Return the number of rounds in which this rank gets a part of `items` items."""
        whole, rest = divmod(items, per_round)
        if drop_last or not rest:
            return whole
        first = 0 if self.even else self.rank * -(-per_round // self.num_ranks)
        return whole + (first < rest)

    def of_batches(self, batches: Sequence[list[Any]], size: int) -> _Divided:
        """Divide a round of batches with `size` samples each; 0 means that the sizes vary."""
        num_ranks, samples = self.num_ranks, list(chain.from_iterable(batches))
        sizes, full = tuple(map(len, batches)), size * len(batches)
        if self.even and (size or len(batches) < num_ranks):
            sizes, full = (-(-len(samples) // num_ranks),) * num_ranks, size * num_ranks
        slices, batch = _cut(sizes, num_ranks, len(samples), full)
        if batch.padded > batch.samples:  # repeat the first samples
            samples += list(islice(cycle(samples), batch.padded - batch.samples))
        return samples, slices, batch


@lru_cache(maxsize=64)  # nearly all rounds have the same size
def _cut(
    sizes: tuple[int, ...], num_ranks: int, samples: int, full: int
) -> tuple[tuple[slice, ...], GlobalBatch]:
    """Return slices of these sizes, and their global batch with `samples` distinct samples."""
    ends = accumulate(sizes)
    slices = tuple(slice(end - size, end) for size, end in zip(sizes, ends, strict=True))
    is_even = len(sizes) == num_ranks and len({*sizes}) == 1
    return slices, GlobalBatch(samples, sum(sizes), full, () if is_even else sizes)


class NoBatch:
    """Sentinel for a rank without a batch in a round; it is a class, so pickling preserves it."""


class BatchSource:
    """Base class; reads a stream on a single rank, or a loader that overrides `__iter__`.

    Batches of an overridden `__iter__` keep their sizes. With `even_batches`, ranks without a batch
    in the last round get a copy of a batch from the same round.
    """

    reads = True  # whether this rank loads samples

    def __init__(self, loader: Any, division: Division) -> None:
        self.loader = changed(loader) if is_plain(loader) else loader  # the loader to read
        self._division = division

    def begin(self, iteration: LoaderIteration) -> Iterator[Item]:
        """Start an iteration, and return the batches that this rank reads.

        Each is returned with its global batch.
        """
        return _ahead(self._rounds(self.read(iteration)), iteration)

    def _rounds(self, batches: Iterator[Any]) -> Iterator[_Parts]:
        num_ranks, full = self._division.num_ranks, batch_size_of(self.loader)
        while taken := [*islice(batches, num_ranks)]:
            if num_ranks == 1:
                samples = full and samples_in(taken[0])
                yield taken, GlobalBatch(samples, samples, full)
                continue
            parts = [*islice(cycle(taken), num_ranks)] if self._division.even else taken
            sizes = tuple(map(size_of, parts))
            new = sum(sizes[: len(taken)])
            yield parts, GlobalBatch(new, sum(sizes), full * len(sizes), sizes)

    def __len__(self) -> int:
        """Return the number of rounds in which this rank gets a batch."""
        return self._division.num_rounds(len(self.loader), self._division.num_ranks, False)

    def opened(self, iteration: LoaderIteration) -> Iterator[Any]:
        """Return the loader's iterator; nested iterations do not use persistent workers."""
        is_apart = iteration.depth and getattr(self.loader, "persistent_workers", False)
        return iter(changed(self.loader, persistent_workers=False) if is_apart else self.loader)

    def read(self, iteration: LoaderIteration) -> Iterator[Any]:
        """Iterate over the loader; seed the generators for each item unless workers read it."""
        items = self.opened(iteration)
        if is_plain(self.loader) and self.loader.num_workers:
            return items
        start, owner = iteration.start, iteration.owner
        number = (start.taken - iteration.reread) // owner.per_round  # of the first item
        return owner.draws.each(items, start.epoch, number)


def _ahead(rounds: Iterator[_Parts], iteration: LoaderIteration) -> Iterator[Item]:
    """Yield the parts of the rounds, which are read one ahead to detect the last.

    Reread, compare and drop the rounds before the start position.
    """
    stream = iteration.owner.stream

    for parts, _ in islice(rounds, iteration.reread // iteration.owner.per_round):
        iteration.reread_batch = iteration.reread_batch or parts
        iteration.checksum = crc32(b"%d" % checksum_of(parts[0]), iteration.checksum)
    iteration.compare_reread()
    following = next(rounds, None)
    while following is not None:
        parts, batch = following
        if stream is not None:
            iteration.stream = copy.deepcopy(stream.state_dict())
        following = next(rounds, None)
        batch = batch if following is not None else batch._replace(is_last=True)
        if stream is None:
            iteration.checksum = crc32(b"%d" % checksum_of(parts[0]), iteration.checksum)
        for part in parts:
            yield part, batch


class MapSource(BatchSource):
    """Reads a map-style dataset. All ranks draw the same indices, and each loads its own part."""

    def __init__(self, loader: Any, order: SampleOrder, division: Division) -> None:
        self._order, self._division = order, division
        self._indices = Indices(order, division)
        self._is_compared = division.num_ranks > 1 and not division.reads_all
        self._has_compared = False
        self._name = "batch_sampler" if order.is_batched else "sampler"
        self.loader = changed(loader, **{self._name: self._indices})

    def begin(self, iteration: LoaderIteration) -> Iterator[Item]:
        self._indices.iteration = iteration
        items, given = _unlabelled(self.opened(iteration)), self._indices.given
        if self._division.num_ranks > 1:  # this rank may have no part of the last round
            items = chain(items, iter(lambda: NoBatch if given else None, None))
        if self._is_compared:
            items = self._checked(items)
        return zip(items, iter(given.popleft, None), strict=False)  # no Python frame per batch

    def _checked(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield items after the ranks have compared their indices and, the first time, samples."""
        first, length, samples = [*islice(items, 1)], None, None
        drawn = self._indices.first
        if not self._has_compared:
            self._has_compared, length = True, len_of(self.loader.dataset)
            last = [self._order.single(length - 1)] if length else []
            samples = self._marks_of(drawn, *last) if drawn else None
        require_same(lengths=length, indices=checksum_of(drawn), samples=samples)
        yield from chain(first, items)

    def _marks_of(self, *batches: list[Any]) -> str | None:
        """Return checksums of drawn batches; None if repeated loads differ."""
        twice = [self._order.loading()(batch) for batch in batches for _ in range(2)]
        options = {self._name: twice, "num_workers": min(self.loader.num_workers, 1)}
        own, marks = {"generator": torch.Generator(), "persistent_workers": False}, list[int]()
        with preserve_generators(), suppress(Exception):  # a dataset may have no such last sample
            marks.extend(map(checksum_of, changed(self.loader, **options, **own)))
        return str(marks) if marks[::2] == marks[1::2] else None

    def __len__(self) -> int:
        return len(self._indices)


def _unlabelled(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches; while no profiler is active, omit torch's profiler label, which takes 5 us."""
    # undocumented torch API
    is_profiled, load = torch.autograd._profiler_enabled, batches._next_data  # type: ignore[attr-defined]
    try:
        while True:
            yield next(batches) if is_profiled() else load()
    except StopIteration:
        return


class Indices:
    """Sampler that yields this rank's indices for each round, in the order of the script's sampler.

    It draws one round ahead to detect the last round.
    """

    iteration: LoaderIteration  # for the next `iter()`, which torch calls twice with workers
    first: list[Any] | None = None  # rank 0's samples in the first round of an iteration

    def __init__(self, order: SampleOrder, division: Division) -> None:
        self._order, self._division = order, division
        self.given = deque[GlobalBatch]()  # for indices whose batches have not been yielded yet
        self._is_alone = division.num_ranks == 1
        size = getattr(order.source, "batch_size", None) if order.yields_lists else 1
        self._size = size if isinstance(size, int) else 0
        self._drop_last = bool(getattr(order.source, "drop_last", False))

    def __len__(self) -> int:
        division, batches = self._division, len(self._order.source)
        return division.num_rounds(batches, division.num_ranks, self._drop_last)

    def __iter__(self) -> Iterator[Any]:
        self.given, self.first = deque(), None
        return (self._alone if self._is_alone else self._ahead)(self.iteration, self.given)

    def _alone(self, iteration: LoaderIteration, given: deque[GlobalBatch]) -> Iterator[Any]:
        """Yield the batches of a single rank without the cost of dividing them."""
        batches = self._order.draw(iteration)
        size, to_load = self._size, self._order.loading()
        usual = GlobalBatch(size, size, size)
        following = next(batches, None)
        while (one := following) is not None:
            following = next(batches, None)
            samples = len(one)
            batch = usual if samples == size else GlobalBatch(samples, samples, size)
            given.append(batch if following is not None else batch._replace(is_last=True))
            yield to_load(one)

    def _ahead(self, iteration: LoaderIteration, given: deque[GlobalBatch]) -> Iterator[Any]:
        rounds = self._drawn(iteration)  # lazy: starts with the first request
        to_load, own = self._order.loading(), self._division.own
        following = next(rounds, None)
        while following is not None:
            (samples, slices, batch), following = following, next(rounds, None)
            parts = slices[own]
            batch = batch if following is not None else batch._replace(is_last=True)
            given.extend([batch] * (len(parts) or 1))
            if self.first is None:
                self.first = samples[slices[0]]
            for part in parts:
                yield to_load(samples[part])

    def _drawn(self, iteration: LoaderIteration) -> Iterator[_Divided]:
        num_ranks, drawn = self._division.num_ranks, self._order.draw(iteration)
        while batches := [*islice(drawn, num_ranks)]:
            if self._drop_last and len(batches) < num_ranks:
                return
            yield self._division.of_batches(batches, self._size)


class StreamSource(BatchSource):
    """Reads a stream. Every rank reads all samples, but collates only its own part."""

    def __init__(self, loader: Any, division: Division) -> None:
        self._stream = StreamRounds(loader, division)
        single: dict[str, Any] = {"batch_size": None, "batch_sampler": None, "drop_last": False}
        single |= {"dataset": self._stream, "collate_fn": identity}
        super().__init__(changed(loader, **single), division)

    def _rounds(self, batches: Iterator[_Read]) -> Iterator[_Parts]:
        """Yield rounds after checking that all ranks have read the same samples."""
        is_alone = self._division.reads_all
        for parts, batch, number in batches:
            if not is_alone:
                require_same(lengths=True, samples=number)
            yield parts, batch
        if not is_alone:
            require_same(lengths=False, samples=None)

    def __len__(self) -> int:
        one = self._stream
        return self._division.num_rounds(len(one.stream), one.full, one.drop_last)


class StreamRounds(IterableDataset[_Read]):
    """Yields the rounds of a stream, each with the collated parts that this rank reads."""

    # no __len__: torch would warn because workers yield more, each with its own last batch
    def __init__(self, loader: DataLoader[Any], division: Division) -> None:
        self._division = division
        self.stream: Any = loader.dataset
        self._collate, self._is_single = loader.collate_fn, loader.batch_size is None
        self._size = loader.batch_size or 1
        self.full = self._size * division.num_ranks
        self.drop_last = bool(loader.drop_last)

    def __iter__(self) -> Iterator[_Read]:
        stream, num_marked = iter(self.stream), self.full
        while read := list(islice(stream, self.full)):
            if self.drop_last and len(read) < self.full:
                return
            number = checksum_of(read[:num_marked])
            num_marked = 1  # only the first sample of later rounds
            batches = [read[at : at + self._size] for at in range(0, len(read), self._size)]
            samples, slices, batch = self._division.of_batches(batches, self._size)
            own = [samples[part] for part in slices[self._division.own]]
            parts = [self._collate(part[0] if self._is_single else part) for part in own]
            yield parts or [NoBatch], batch, number


_REPEATED = (
    "note: the data of {} have fewer batches than those of other ranks. The first batch of such a"
    " rank is repeated until all ranks have finished, so its samples are trained on more often."
    " Give all ranks the same number of samples"
)


class PreshardedSource(BatchSource):
    """Reads presharded data, where each rank has its own loader or part of a stream.

    In each round, the ranks exchange their sample counts. A rank that has run out of data
    repeats its first batch until all ranks have finished.
    """

    def __init__(self, source: BatchSource, loader: Any, num_ranks: int) -> None:
        self._source, self.loader, self._num_ranks = source, source.loader, num_ranks
        self._division = Division()  # of this rank's own data
        self._full, self._repeats = batch_size_of(loader) * num_ranks, num_repeats(loader)
        self._sampler, self._is_compared = distributed_sampler_of(loader), False

    def begin(self, iteration: LoaderIteration) -> Iterator[Item]:
        if not self._is_compared:
            self._compare_samplers()
        return self._with_others(self._source.begin(iteration), iteration)

    def _compare_samplers(self) -> None:
        """Raise UsageError if the DistributedSamplers draw different orders or equal parts."""
        own, self._is_compared = self._sampler, True
        text = "" if own is None else f"{own.rank} {own.shuffle} {own.seed * own.shuffle}"
        call = f"{LOOP}, comparing samplers"
        texts = call_barrier(call, text) or [text] * (self._num_ranks if has_real_ranks() else 1)
        if "" in texts:
            return
        ranks, *options = zip(*map(str.split, texts), strict=True)
        for name, values in zip(("shuffle=", "seed="), options, strict=True):
            if len({*values}) > 1:
                raise _differing(
                    f"the ranks' DistributedSamplers have different {name}, so the ranks repeat"
                    " some samples and omit others",
                    f"pass the same {name} to DistributedSampler on all ranks; it divides the data"
                    " by rank",
                )
        if len({*ranks}) < len(ranks):
            raise _differing(
                "several ranks created their DistributedSampler with"
                f" rank={max(ranks, key=ranks.count)}, so they read the same samples and omit other"
                " samples",
                "omit num_replicas= and rank=, or pass rank=accelerator.process_index",
            )

    def _with_others(self, items: Iterator[Item], iteration: LoaderIteration) -> Iterator[Item]:
        taken, first = iteration.start.taken // iteration.owner.unit, NoBatch
        length, num_repeated = len(self.loader) if self._repeats else 0, 0
        for number in count(taken + 1):
            batch, read = next(items, (NoBatch, None))
            size = new = 0 if batch is NoBatch else size_of(batch)
            if number == length:
                new -= self._repeats
            own = f"{new} {read is not None:d} {read is None or read.is_last:d}"
            lines = call_barrier(f"{LOOP}, comparing sizes", own) or [own] * self._num_ranks
            rows = [map(int, line.split()) for line in lines]
            rank_sizes, have_batches, are_last = zip(*rows, strict=True)
            if not any(have_batches):
                return
            num_repeated += not all(have_batches)
            if num_repeated == 2:
                short = named([rank for rank, has in enumerate(have_batches) if not has])
                iteration.owner.run.report(_REPEATED.format(short))
            if first is NoBatch and not taken:
                first = batch
            if batch is NoBatch:
                first = self._first(iteration) if first is NoBatch else first
                batch, size = first, size_of(first)
            total = sum(rank_sizes)
            is_last = all(are_last)
            yield batch, GlobalBatch(total, total, self._full, rank_sizes, size - new, is_last)

    def _first(self, iteration: LoaderIteration) -> Any:
        """Return the epoch's first batch, for a run that resumes at the end of this rank's data."""
        again, stream = copy.copy(iteration), iteration.owner.stream
        again.start = iteration.start._replace(taken=0, checksum=0)
        if isinstance(self._source, MapSource):
            return next(self._source.begin(again), (NoBatch, None))[0]
        if stream is None:
            return next(iter(iteration.reread_batch), NoBatch)
        state = copy.deepcopy(stream.state_dict())
        stream.load_state_dict(copy.deepcopy(iteration.first))
        first = next(self._source.read(again), NoBatch)  # does not read a batch ahead
        stream.load_state_dict(state)
        return first


class DispatchedSource(BatchSource):
    """Receives batches that rank 0 reads and scatters to all ranks."""

    def __init__(self, source: BatchSource, rank: int, num_ranks: int) -> None:
        self._source, self.loader = source, source.loader
        self.reads, self._num_ranks = rank == 0, num_ranks

    def begin(self, iteration: LoaderIteration) -> Iterator[Item]:
        return self._received(self._source.begin(iteration) if self.reads else iter(()))

    def _received(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yield this rank's part of every round; only rank 0 passes the parts of all ranks."""
        while True:
            sent: Any = None
            if self.reads:
                first, batch = next(items, (NoBatch, None))
                num_parts = (len(batch.rank_sizes) or self._num_ranks) if batch else 1
                parts = [first, *(part for part, _ in islice(items, num_parts - 1))]
                ready = [for_each_tensor(torch.Tensor.cpu, part) for part in parts]
                ready += [NoBatch] * (self._num_ranks - len(ready))
                sent = [(part, batch) for part in ready]
            call_barrier(f"{LOOP}, scattering")
            received: list[Any] = [None]
            dist.scatter_object_list(received, sent)
            part, batch = received[0]
            if batch is None:
                return
            yield part, batch

    def __len__(self) -> int:
        return len(self._source)


def samples_in(batch: Any) -> int:
    """Return the length of the first non-empty tensor in `batch`; 0 if there is none."""
    tensors = (leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim)
    return next((len(tensor) for tensor in tensors if len(tensor)), 0)


def size_of(batch: Any) -> int:
    """Return the number of samples in a batch; 1 if it has no tensors."""
    if batch is NoBatch:
        raise UsageError(
            "a rank has no batches, but other ranks do",
            where=LOOP,
            fix="provide data on each rank, or prepare the full dataset on all ranks",
            code=Code.DATA_DIFFERS,
        )
    return samples_in(batch) or (len(batch) if isinstance(batch, list) else 1)


def require_same(**facts: object) -> None:
    """Raise UsageError if facts about the data differ between ranks; ignore facts that are None."""
    call = f"{LOOP}, comparing {', '.join(facts)}"
    texts = call_barrier(call, "\n".join(map(str, facts.values()))) or []
    columns = zip(*(text.split("\n") for text in texts), strict=True)
    for name, values in zip(facts, columns, strict=False):
        if "None" not in values and len({*values}) > 1:
            raise _differing(
                f"the ranks' datasets have different {name}, so they cannot be sharded",
                "create the same data in the same order on all ranks: call set_seed(...)"
                " first, and seed your own generators, such as random.Random(0) in a sampler; for"
                " random numbers that a stream draws in workers, pass Accelerator(seed=...); or,"
                " if each rank reads its own part, pass Accelerator(dataloader_config="
                "DataLoaderConfiguration(already_sharded=True))",
            )


def _differing(what: str, fix: str) -> UsageError:
    code = Code.DATA_DIFFERS
    return UsageError(what, where=LOOP, fix=fix, code=code, is_of_all_ranks=True)


def batch_source_for(loader: Any, draws: Draws, division: Division) -> BatchSource:
    """Return the batch source of `loader`, a DataLoader or any iterable of batches."""
    num_ranks = division.num_ranks
    if division.is_presharded:
        return PreshardedSource(batch_source_for(loader, draws, Division()), loader, num_ranks)
    if isinstance(draws, SampleOrder):
        source: BatchSource = MapSource(loader, draws, division)
    else:
        kind = StreamSource if num_ranks > 1 and is_plain(loader) else BatchSource
        source = kind(loader, division)
    return DispatchedSource(source, division.rank, num_ranks) if division.reads_all else source
