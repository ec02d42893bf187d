"""Loaders of one rank: each reads its own share of the rounds, or all of them where it is alone."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from headway.data.active_loader import GlobalBatch
from headway.data.position import (
    FRESH,
    Division,
    Indices,
    LookaheadSampler,
    Offset,
    Round,
    Start,
    samples_in,
)
from headway.data.samplers import SkipBatchSampler, changed
from headway.distributed.collectives import broadcast_object_list
from headway.distributed.meeting import meet, named
from headway.errors import UsageError

MADE_OF = (  # the arguments of a DataLoader that every share keeps
    *("dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers"),
    "pin_memory_device",  # not in_order: ranks with other orders would mix up their batches
)


Unpack = Callable[[Any], tuple[Any, GlobalBatch]]
PLAIN = Indices()


class Lookahead(Protocol):
    """Knows whether an item follows the one taken last.

    An attribute, which is faster to read than a property: it is read in every step.
    """

    has_more: bool


class NoBatch:
    """In place of a batch: this rank has no part of the round. A class, which pickle keeps."""


class Share:
    """All of a loader, but for `skip` batches at the beginning: the share of the only rank."""

    reads = True
    """Whether this rank loads samples."""
    _ahead: LookaheadSampler | _BatchShard | None = None
    """What draws the indices, if this rank does."""

    draws_ahead = True
    """Whether the indices of the batch after the one to load are drawn."""

    def __init__(self, loader: Any, skip: int = 0, indices: Indices = PLAIN) -> None:
        if is_plain(loader) and not isinstance(loader.dataset, IterableDataset):
            left_out, skip = Offset(skip, skip * batch_size_of(loader)), 0
            self._ahead = LookaheadSampler(
                source_of(loader), indices, left_out, is_ahead=self.draws_ahead
            )
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            loader = changed(loader, **{name: self._ahead})
        self._loader, self._skip = loader, skip

    @property
    def lookahead(self) -> Lookahead | None:
        """What knows if an item follows the one taken last; None: that one has to be loaded."""
        return None if self._ahead is None or self._loader.num_workers else self._ahead

    def begin(self, start: Start = FRESH) -> tuple[Iterator[Any], Unpack]:
        """Begin a pass; return its items, and the function that unpacks an item."""
        if self._ahead is not None:
            self._ahead.start = start
        full = batch_size_of(self._loader)
        usual = GlobalBatch(full, full, full)

        def unpack(batch: Any) -> tuple[Any, GlobalBatch]:
            samples = full and samples_in(batch)
            return batch, usual if samples == full else GlobalBatch(samples, samples, full)

        batches = iter(self._loader)
        taken = start.taken
        skip = self._skip if taken is None or self._ahead is not None else taken.batches
        return islice(batches, skip, None) if skip else batches, unpack

    def __len__(self) -> int:
        return max(0, self._count() - self._skip)

    def _count(self) -> int:
        return len(self._loader)


class MapShare(Share):
    """Every rank draws the same samples, and loads its own."""

    def __init__(
        self,
        loader: DataLoader[Any],
        rank: int,
        division: Division,
        skip: int,
        indices: Indices = PLAIN,
    ) -> None:
        rounds = MapRounds(loader, division, rank, indices)
        self._shard = self._ahead = _BatchShard(rounds, rank, skip, indices)
        if loader.batch_sampler is None:
            self._loader = rebuilt(loader, batch_size=None, sampler=self._shard)
        else:
            self._loader = rebuilt(loader, batch_sampler=self._shard)
        self._skip = 0

    def begin(self, start: Start = FRESH) -> tuple[Iterator[Any], Unpack]:
        self._shard.start = start
        batches = iter(self._loader)
        global_batches = self._shard.global_batches  # those of the pass that has just begun
        items = chain(batches, _left(global_batches))
        return items, lambda batch: (batch, global_batches.popleft())


def _left(global_batches: deque[GlobalBatch]) -> Iterator[type[NoBatch]]:
    while global_batches:  # the caller takes one for each item
        yield NoBatch


class StreamShare(Share):
    """Every rank reads the whole stream, and collates its own samples."""

    def __init__(
        self,
        loader: DataLoader[Any],
        rank: int,
        division: Division,
        skip: int,
        indices: Indices = PLAIN,
    ) -> None:
        self._stream = StreamRounds(loader, division, rank)
        self._num_batches = division.num_batches
        parts = _StreamParts(self._stream, rank)
        collate = partial(_collate_part, collate_of(loader))
        super().__init__(rebuilt(loader, dataset=parts, batch_size=None, collate_fn=collate), skip)

    def begin(self, start: Start = FRESH) -> tuple[Iterator[Any], Unpack]:
        taken = start.taken
        skip = self._skip if taken is None else taken.batches // self._num_batches
        parts = islice(self._parts(iter(self._loader)), skip, None)
        return parts, lambda part: (part.samples, part.batch)

    def _parts(self, parts: Iterator[_Part]) -> Iterator[_Part]:
        for part in parts:
            require_one_stream(part.mark)
            yield part
        require_one_stream(None)

    def _count(self) -> int:
        return self._stream.count()


class MapRounds:
    """The rounds of a map data set: lists of indices, in the order of its sampler.

    With `all_read` every rank draws them, so their generators must agree; else only rank 0 does.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        division: Division,
        rank: int,
        indices: Indices = PLAIN,
        *,
        all_read: bool = True,
    ) -> None:
        self._division, self._rank, self._indices = division, rank, indices
        # without a batch sampler each of the sampler's items is a batch
        self.is_batched = loader.batch_sampler is not None or isinstance(
            loader.sampler, BatchSampler
        )
        self._source: Any = source_of(loader)
        self.start = FRESH  # of the pass
        self._size = batch_size_of(loader) if self.is_batched else 1
        self._drop_last = bool(getattr(self._source, "drop_last", False))
        samplers = (self._source, getattr(self._source, "sampler", None))
        self._generators = _Generators(*samplers if all_read else ())

    def __len__(self) -> int:
        """Return the number of rounds of which this rank has a part."""
        num_batches, size = self._division.num_batches, self._size
        batches = self._source
        if self._division.split and not self._division.even and type(batches) is BatchSampler:
            samples = len(batches.sampler)  # type: ignore[arg-type]
            return self._division.num_rounds(samples, size, self._rank, self._drop_last)
        return self._division.num_rounds(len(batches), num_batches, self._rank, self._drop_last)

    def __iter__(self) -> Iterator[Round]:
        self._generators.agree()
        try:
            yield from self._rounds(self.start)
        finally:
            self._generators.restore()

    def _rounds(self, start: Start) -> Iterator[Round]:
        num_batches = self._division.num_batches
        taken = start.taken or Offset()
        source, first = self._indices.after(self._source, taken, num_batches * self._size)
        if not self.is_batched:
            source = ([one] for one in source)
        while batches := list(islice(source, num_batches)):
            if self._drop_last and len(batches) < num_batches:
                return
            first = first or list(chain.from_iterable(batches))
            yield self._division.of_batches(batches, first, self._size)


class _BatchShard:
    """A batch sampler that gives one rank its share of each round."""

    def __init__(self, rounds: MapRounds, rank: int, skip: int, indices: Indices) -> None:
        self._rounds, self._rank, self._skip, self._indices = rounds, rank, skip, indices
        self.global_batches: deque[GlobalBatch] = deque()
        self.has_more = False  # whether a round follows the one that was given last
        self.start = FRESH  # of the pass

    def __len__(self) -> int:
        return max(0, len(self._rounds) - self._skip)

    def __iter__(self) -> Iterator[Any]:
        self.global_batches = deque()
        return self._indices.to_load(self._shares(self.global_batches, self.start))

    def _shares(self, global_batches: deque[GlobalBatch], start: Start) -> Iterator[Any]:
        self._rounds.start = start
        rounds = islice(self._rounds, self._skip if start.taken is None else 0, None)
        start.drawing()
        batch, following = None, next(rounds, None)
        start.ready()
        while following is not None:  # one round ahead
            (samples, slices, batch), following = following, next(rounds, None)
            self.has_more = following is not None
            if self._rank < len(slices):
                global_batches.append(batch)
                mine = samples[slices[self._rank]]
                yield mine if self._rounds.is_batched else mine[0]
        if batch is not None and self._rank >= len(slices):
            global_batches.append(batch)  # of the last round, of which this rank has no part


class StreamRounds(IterableDataset[Round]):
    """The rounds of a stream: lists of samples."""

    def __init__(self, loader: DataLoader[Any], division: Division, rank: int) -> None:
        self._stream, self._division, self._rank = loader.dataset, division, rank
        self._full = (loader.batch_size or 1) * division.num_batches
        self._drop_last = bool(loader.drop_last)

    def __iter__(self) -> Iterator[Round]:
        stream = iter(self._stream)
        first: list[Any] = []
        while samples := list(islice(stream, self._full)):
            if self._drop_last and len(samples) < self._full:
                return
            first = first or samples
            yield self._division.of_samples(samples, first, self._full)

    def count(self) -> int:
        """Return the number of rounds of which this rank has a part, if the stream has a length."""
        # no __len__: torch would warn when workers, each with a last batch, give more batches
        samples = len(self._stream)  # type: ignore[arg-type]
        return self._division.num_rounds(samples, self._full, self._rank, self._drop_last)


class _Part(NamedTuple):
    """One rank's samples of a round, and the `mark` of samples that all ranks have read."""

    samples: Any
    batch: GlobalBatch
    mark: int


class _StreamParts(IterableDataset[_Part]):
    """One rank's parts of the rounds of a stream."""

    def __init__(self, rounds: StreamRounds, rank: int) -> None:
        self._rounds, self._rank = rounds, rank

    def __iter__(self) -> Iterator[_Part]:
        for index, (samples, slices, batch) in enumerate(self._rounds):
            mine = samples[slices[self._rank]] if self._rank < len(slices) else NoBatch
            marked = samples[: batch.samples if index == 0 else 1]  # of later ones the first
            yield _Part(mine, batch, mark(marked))


def _collate_part(collate: Callable[[list[Any]], Any], part: _Part) -> _Part:
    """Collate a part's samples."""
    return part if part.samples is NoBatch else part._replace(samples=collate(part.samples))


def _collate_only(collate: Callable[[Any], Any], samples: list[Any]) -> Any:
    """Collate the single sample of a loader without batch size."""
    return collate(samples[0])


def collate_of(loader: DataLoader[Any], is_batched: bool | None = None) -> Callable[[Any], Any]:
    """Return what makes a batch of a list of samples; loader workers can be sent it."""
    if is_batched is None:
        is_batched = loader.batch_size is not None
    return loader.collate_fn if is_batched else partial(_collate_only, loader.collate_fn)


class _Generators:
    """The random generators of samplers, kept equal on all ranks: those of rank 0 count."""

    def __init__(self, *samplers: Any) -> None:
        self._samplers = [one for one in samplers if hasattr(one, "generator")]
        self._unseeded = [one for one in self._samplers if one.generator is None]

    def agree(self) -> None:
        for sampler in self._unseeded:  # draws what torch's RandomSampler would draw itself
            seed = int(torch.empty((), dtype=torch.int64).random_())
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(seed)
        if self._samplers:
            states = [sampler.generator.get_state() for sampler in self._samplers]
            with named("a loop over a prepared DataLoader"):
                states = broadcast_object_list(states)
            for sampler, state in zip(self._samplers, states, strict=True):
                sampler.generator.set_state(state)

    def restore(self) -> None:
        for sampler in self._unseeded:
            sampler.generator = None


def is_plain(loader: Any) -> bool:
    """Return whether `loader` is a DataLoader that iterates as torch's does."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def is_stateful(loader: Any) -> bool:
    """Return whether `loader` is torchdata's StatefulDataLoader."""
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    return torchdata is not None and type(loader) is torchdata.StatefulDataLoader


def as_plain(loader: Any) -> Any:
    """Return torchdata's StatefulDataLoader as one of torch; others are returned as they are.

    A prepared loader keeps its state itself, for any number of ranks; one that was given a state
    before is refused.
    """
    if not is_stateful(loader):
        return loader
    if loader.next_iter_state is not None:
        raise UsageError(
            "a StatefulDataLoader was given a state before it was prepared",
            where="the script's load_state_dict(...)",
            fix="prepare the loader first, and let save_state() and load_state() keep its state",
        )
    return rebuilt(loader, **batches_of(loader))


def batches_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments of a DataLoader that say how samples become batches."""
    if isinstance(loader.dataset, IterableDataset):
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_sampler is None:
        return {"sampler": loader.sampler, "batch_size": None}
    return {"batch_sampler": loader.batch_sampler}


def source_of(loader: DataLoader[Any]) -> Any:
    """Return what draws the indices of a map data set: the batch sampler, or else the sampler."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def without_first(loader: DataLoader[Any], batches: int) -> DataLoader[Any]:
    """Return `loader`, of a map data set, without its first batches, which are not loaded."""
    if loader.batch_sampler is None:
        skipping = SkipBatchSampler(loader.sampler, batches)
        return rebuilt(loader, batch_size=None, sampler=skipping)
    return rebuilt(loader, batch_sampler=SkipBatchSampler(loader.batch_sampler, batches))


def rebuilt(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a loader like `loader`, but for `changes`."""
    return DataLoader(**{**{name: getattr(loader, name) for name in MADE_OF}, **changes})


def batch_size_of(loader: Any) -> int:
    """Return how many samples a full batch of `loader` has; 0 if that is not known."""
    sources = (loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None))
    sizes = (getattr(source, "batch_size", None) for source in sources)
    return next((size for size in sizes if isinstance(size, int)), 0)


VALUES = 64  # of each tensor that are compared
_END = "end"  # in place of a mark


def mark(samples: Any) -> int:
    """Return a number that is the same for the same samples in every process.

    Not from pickle, whose output for a tensor or a set differs between processes. Objects other
    than numbers, text, arrays and tensors count by their type only.
    """
    return crc32(repr(_values(samples)).encode(errors="backslashreplace"))


def require_one_stream(mark: int | None) -> None:
    """Compare the marks of all ranks' streams; every rank calls this for each round.

    None is the end of the stream. Ranks have to learn in each round that none has come to its end
    before the others, so to send a mark along costs no further message.
    """
    marks = meet("a loop over a prepared DataLoader", _END if mark is None else str(mark))
    if marks is None:
        return
    what = "lengths" if _END in marks else "samples"
    raise UsageError(
        f"the ranks' streams (IterableDataset) give different {what}, so they cannot be shared out",
        where="the loop over a prepared DataLoader",
        fix="seed the stream alike on all ranks, as with set_seed(...); or, if it picks its samples"
        " by rank itself, leave its loader out of prepare()",
    )


def _values(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        is_dense = data.layout == torch.strided
        return tuple(data.shape), data.flatten()[:VALUES].tolist() if is_dense else None
    if isinstance(data, Mapping):
        return [(_values(key), _values(value)) for key, value in data.items()]
    if isinstance(data, (list, tuple)):
        return [_values(one) for one in data]
    if data is None or isinstance(data, (str, bytes, int, float, complex)):
        return data
    has_objects = getattr(getattr(data, "dtype", None), "hasobject", False)
    if callable(getattr(data, "tobytes", None)) and not has_objects:  # numpy's arrays, PIL's images
        return crc32(data.tobytes())
    return type(data).__name__
