"""One rank reads the data for all: it sends each rank its part of every round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from headway.data.active_loader import GlobalBatch
from headway.data.configuration import DataLoaderConfiguration
from headway.data.position import (
    FRESH,
    Division,
    Indices,
    Offset,
    Round,
    Start,
    of_ready_batches,
    samples_in,
)
from headway.data.seeds import SampleSeeds
from headway.data.sharding import (
    PLAIN,
    Lookahead,
    MapRounds,
    MapShare,
    NoBatch,
    Share,
    StreamRounds,
    StreamShare,
    Unpack,
    batch_size_of,
    collate_of,
    is_plain,
    rebuilt,
)
from headway.data.workers import with_lasting_workers
from headway.distributed.meeting import meet
from headway.distributed.nested import for_each_tensor, is_on
from headway.errors import UsageError

Parts = tuple[list[Any], GlobalBatch]  # of the ranks that have any
_CPU = torch.device("cpu")


class DispatchedShare(Share):
    """The rank's part of what rank 0 reads; the others read nothing."""

    def __init__(
        self, loader: Any, rank: int, division: Division, skip: int, indices: Indices = PLAIN
    ) -> None:
        self._rank, self._num_ranks = rank, division.num_ranks
        self.reads = rank == 0
        self._division = division
        self._rounds: Any = None
        self.has_more = False
        if not is_plain(loader):
            super().__init__(loader, skip)
        elif isinstance(loader.dataset, IterableDataset):
            self._rounds = StreamRounds(loader, division, rank)
            collate = partial(_collate_each, collate_of(loader))
            changes: dict[str, Any] = {"dataset": self._rounds, "collate_fn": collate}
            super().__init__(rebuilt(loader, batch_size=None, **changes), skip)
        else:
            self._rounds = MapRounds(loader, division, rank, indices, all_read=False)
            collate = partial(_collate_each, collate_of(loader, self._rounds.is_batched))
            changes = {"dataset": _Rounds(loader.dataset), "collate_fn": collate}
            changes["sampler"] = self._rounds
            super().__init__(rebuilt(loader, batch_size=None, **changes), skip, _OfRounds(indices))

    @property
    def lookahead(self) -> Lookahead | None:
        return None if super().lookahead is None else self

    def begin(self, start: Start = FRESH) -> tuple[Iterator[Any], Unpack]:
        rounds = self._read(start) if self._rank == 0 else None
        if self._rank > 0:
            start.ready()
        return self._received(rounds), lambda part: part

    def _received(self, rounds: Iterator[Parts] | None) -> Iterator[tuple[Any, GlobalBatch]]:
        """Yield this rank's part of every round; rank 0 gives the rounds."""
        while True:
            sent: list[Any] | None = None
            if rounds is not None:
                parts = _for_each_rank(next(rounds, None), self._num_ranks)
                has_more = self._ahead is not None and self._ahead.has_more
                sent = [(part, has_more) for part in parts]
            part, self.has_more = _scattered(sent)
            if part is None:
                return
            yield part

    def _read(self, start: Start) -> Iterator[Parts]:
        skip, taken = self._skip, start.taken
        if isinstance(self._rounds, MapRounds):
            self._rounds.start = start
            if self._ahead is not None:  # draws them all, and leaves out none itself
                self._ahead.start = start._replace(taken=taken and Offset())
        elif taken is not None:
            skip = taken.batches // self._division.num_batches
        rounds: Iterator[Parts] = iter(self._loader)
        if self._rounds is None:
            rounds = _of_batches(self._loader, self._division)
        return islice(rounds, skip, None)

    def _count(self) -> int:
        if isinstance(self._rounds, StreamRounds):
            return self._rounds.count()
        if self._rounds is not None:
            return len(self._loader)
        num_batches = self._division.num_batches
        return self._division.num_rounds(
            len(self._loader), num_batches, self._rank, drop_last=False
        )


class _OfRounds(Indices):
    """The form that the indices in rounds have."""

    def __init__(self, indices: Indices) -> None:
        self._indices = indices

    def to_load(self, given: Iterator[Any]) -> Iterator[Any]:
        return self._indices.rounds_to_load(given)


def _scattered(objects: list[Any] | None) -> Any:
    """Return this rank's of the objects that rank 0 has for all."""
    if objects is not None and len(objects) == 1:
        return objects[0]
    meet("a loop over a prepared DataLoader")
    received: list[Any] = [None]
    dist.scatter_object_list(received, objects)
    return received[0]


def _for_each_rank(round_: Parts | None, num_ranks: int) -> list[tuple[Any, GlobalBatch] | None]:
    if round_ is None:
        return [None] * num_ranks
    parts, batch = round_
    sent = [
        part if is_on(part, _CPU) else for_each_tensor(torch.Tensor.cpu, part) for part in parts
    ]
    missing = [NoBatch] * (num_ranks - len(parts))
    return [(part, batch) for part in (*sent, *missing)]


class _Rounds(Dataset[Round]):
    """Loads the samples of whole rounds from a map data set."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, indices: Round) -> Round:
        if callable(getattr(self._dataset, "__getitems__", None)):
            return indices._replace(samples=self._dataset.__getitems__(indices.samples))
        return indices._replace(samples=[self._dataset[index] for index in indices.samples])


def _collate_each(collate: Callable[[list[Any]], Any], round_: Round) -> Parts:
    """Collate each rank's part of a round."""
    samples, slices, batch = round_
    return [collate(samples[one]) for one in slices], batch


def _of_batches(loader: Iterable[Any], division: Division) -> Iterator[Parts]:
    """Yield rounds of ready batches, which keep their sizes.

    Ranks without a batch in the last round get one of the first round again, if all must have one.
    """
    batches = iter(loader)
    first: list[Any] = []
    while taken := list(islice(batches, division.num_batches)):
        first = first or taken
        if division.split:
            yield _cut(taken[0], division, full=samples_in(first[0]))
            continue
        missing = division.num_ranks - len(taken) if division.even else 0
        ready = [*taken, *islice(cycle(first), missing)]
        yield ready, of_ready_batches(tuple(map(_size_of, ready)), len(taken))


def _size_of(batch: Any) -> int:
    """Return the number of samples in a batch; 1, for the batch itself, if it has no tensors."""
    return samples_in(batch) or (len(batch) if isinstance(batch, list) else 1)


def _cut(batch: Any, division: Division, full: int) -> Parts:
    """Divide one batch, of usually `full` samples, among the ranks."""
    size = samples_in(batch)
    if not size:
        raise UsageError(
            f"split_batches=True, but a batch is a {type(batch).__name__} without tensors, which"
            " cannot be split",
            where="the loop over a prepared DataLoader",
            fix="let the loader yield tensors, alone or nested in lists, tuples and mappings; or"
            " remove split_batches=True",
        )
    rows = list(range(size))
    indices, slices, global_batch = division.of_samples(rows, rows, max(size, full))
    return [_rows_of(batch, indices[one], size) for one in slices], global_batch


def _rows_of(batch: Any, rows: list[int], size: int) -> Any:
    """Return these rows of every tensor that has one for each of the batch's `size` samples."""

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[rows] if tensor.ndim and len(tensor) == size else tensor

    return for_each_tensor(take, batch)


def share_of(
    loader: Any,
    rank: int,
    num_ranks: int,
    config: DataLoaderConfiguration,
    skip: int = 0,
    seeds: SampleSeeds | None = None,
) -> Share:
    """Return the share of `loader`, a DataLoader or any iterable of batches, that this rank reads.

    `skip` batches are left out at the beginning of each pass. Without `seeds` all generators are
    left alone.
    """
    _refuse_distributed_sampler(loader, num_ranks)
    if num_ranks > 1:
        _refuse_what_cannot_be_shared(loader, config, num_ranks)
    loader, indices = with_lasting_workers(loader), PLAIN
    if seeds is not None and is_plain(loader):
        loader, indices = seeds.seed_loader(loader), seeds.indices(loader)
    if num_ranks == 1:
        return Share(loader, skip, indices)
    division = Division(num_ranks, config.split_batches, config.even_batches)
    if config.dispatch_batches or not is_plain(loader):
        return DispatchedShare(loader, rank, division, skip, indices)
    kind = StreamShare if isinstance(loader.dataset, IterableDataset) else MapShare
    return kind(loader, rank, division, skip, indices)


def _refuse_distributed_sampler(loader: Any, num_ranks: int) -> None:
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler) and max(sampler.num_replicas, num_ranks) > 1:
            raise UsageError(
                f"the loader has a DistributedSampler for {sampler.num_replicas} ranks, so its"
                " samples would be shared out twice",
                where="the script's prepare(...)",
                fix="give the DataLoader shuffle=True (or False) and no sampler; prepare() shares"
                " out",
            )


def _refuse_what_cannot_be_shared(
    loader: Any, config: DataLoaderConfiguration, num_ranks: int
) -> None:
    if not is_plain(loader):
        if config.dispatch_batches is False:
            raise UsageError(
                f"{type(loader).__name__} has an __iter__ of its own, which only rank 0 can run for"
                " all ranks, but dispatch_batches is False",
                where="the script's DataLoaderConfiguration(dispatch_batches=False)",
                fix="leave dispatch_batches out; or leave the loader out of prepare(), and let each"
                " rank read its own data",
            )
    elif config.split_batches and (not batch_size_of(loader) or batch_size_of(loader) % num_ranks):
        raise UsageError(
            f"split_batches=True, but batch_size {batch_size_of(loader) or None} cannot be split"
            f" over {num_ranks} ranks",
            where="the script's Accelerator(split_batches=True)",
            fix=f"give the DataLoader a batch_size that is a multiple of {num_ranks}",
        )
