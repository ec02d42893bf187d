"""One rank reads the data for all: it sends each rank its part of every round."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist

from headway.data import shares
from headway.data.active_loader import GlobalBatch
from headway.data.configuration import DataLoaderConfiguration
from headway.data.order import Order
from headway.data.passes import Pass
from headway.data.rounds import Division, samples_in
from headway.data.samplers import batch_size_of, distributed_sampler_of, is_plain
from headway.data.shares import LOOP, Item, NoBatch, ReadBySelf, Share, size_of
from headway.distributed.meeting import meet
from headway.distributed.nested import for_each_tensor, is_on
from headway.errors import UsageError

Parts = tuple[list[Any], GlobalBatch]  # of the ranks that have any
_CPU = torch.device("cpu")


class DispatchedShare(ReadBySelf):
    """The rank's part of what rank 0 reads; the others read nothing."""

    can_check = False

    def __init__(self, loader: Any, order: Order | None, rank: int, division: Division) -> None:
        super().__init__(loader, order)
        self._rank, self._division, self.reads = rank, division, rank == 0
        self._drop_last = is_plain(loader) and bool(loader.drop_last)
        self._size = batch_size_of(loader)

    def begin(self, start: Pass) -> tuple[Iterator[Item], int]:
        rounds = None
        if self.reads:
            rounds = _rounds(self.batches(start), self._division, self._drop_last, self._size)
        return self._received(rounds), 0

    def _received(self, rounds: Iterator[Parts] | None) -> Iterator[Item]:
        """Yield this rank's part of every round; rank 0 gives the rounds."""
        while True:
            sent: list[Any] | None = None
            if rounds is not None:
                parts = _for_each_rank(next(rounds, None), self._division.num_ranks)
                has_more = self.indices is not None and self.indices.has_more
                sent = [(part, has_more) for part in parts]
            part, self.has_more = _scattered(sent)
            if part is None:
                return
            yield part

    def __len__(self) -> int:
        num_batches = self._division.num_batches
        return self._division.num_rounds(len(self.loader), num_batches, self._rank, self._drop_last)


def _scattered(objects: list[Any] | None) -> Any:
    """Return this rank's of the objects that rank 0 has for all."""
    if objects is not None and len(objects) == 1:
        return objects[0]
    meet(LOOP)
    received: list[Any] = [None]
    dist.scatter_object_list(received, objects)
    return received[0]


def _for_each_rank(round_: Parts | None, num_ranks: int) -> list[Item | None]:
    if round_ is None:
        return [None] * num_ranks
    parts, batch = round_
    sent = [
        part if is_on(part, _CPU) else for_each_tensor(torch.Tensor.cpu, part) for part in parts
    ]
    missing = [NoBatch] * (num_ranks - len(parts))
    return [(part, batch) for part in (*sent, *missing)]


def _rounds(
    batches: Iterator[Any], division: Division, drop_last: bool, size: int
) -> Iterator[Parts]:
    """Yield rounds of ready batches, which keep their sizes; a full one has `size` samples.

    Ranks without a batch in the last round get one of that round again, if all must have one.
    """
    full = size
    while taken := list(islice(batches, division.num_batches)):
        if drop_last and len(taken) < division.num_batches:
            return
        if division.split:
            full = max(full, samples_in(taken[0]))
            yield _cut(taken[0], division, full)
            continue
        missing = division.num_ranks - len(taken) if division.even else 0
        ready = [*taken, *islice(cycle(taken), missing)]
        sizes = tuple(map(size_of, ready))
        yield ready, GlobalBatch(sum(sizes[: len(taken)]), sum(sizes), size * len(sizes), sizes)


def _cut(batch: Any, division: Division, full: int) -> Parts:
    """Divide one batch, of usually `full` samples, among the ranks."""
    size = samples_in(batch)
    if not size:
        raise UsageError(
            f"split_batches=True, but a batch is a {type(batch).__name__} without tensors, which"
            " cannot be split",
            where=LOOP,
            fix="let the loader yield tensors, alone or nested in lists, tuples and mappings; or"
            " remove split_batches=True",
        )
    rows = list(range(size))
    indices, slices, global_batch = division.of_samples(rows, max(size, full))
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
    order: Order | None,
    *,
    is_own: bool,
) -> Share:
    """Return the share of `loader`, a DataLoader or any iterable of batches, that this rank reads.

    `order` draws the indices of a map data set; None: it is none. `is_own`: the loader gives this
    rank's share already.
    """
    division = Division(num_ranks, config.split_batches, config.even_batches)
    if is_own and num_ranks > 1:
        return shares.OwnShare(loader, order, num_ranks)
    if num_ranks > 1 and (config.dispatch_batches or not is_plain(loader)):
        return DispatchedShare(loader, order, rank, division)
    if order is not None:
        return shares.MapShare(loader, order, rank, division)
    return Share(loader) if num_ranks == 1 else shares.StreamShare(loader, rank, division)


def refuse_what_cannot_be_shared(
    loader: Any, config: DataLoaderConfiguration, num_ranks: int
) -> None:
    """Raise UsageError for a loader that ranks cannot share."""
    sampler = distributed_sampler_of(loader)
    if sampler is not None and max(sampler.num_replicas, num_ranks) > 1:
        if config.already_sharded and sampler.num_replicas == num_ranks:
            return
        raise UsageError(
            f"the loader has a DistributedSampler for {sampler.num_replicas} ranks, so its"
            " samples would be shared out twice",
            where="the script's prepare(...)",
            fix="give the DataLoader shuffle=True (or False) and no sampler: prepare() shares out;"
            " or, for as many ranks, pass DataLoaderConfiguration(already_sharded=True)",
        )
    if num_ranks == 1 or config.already_sharded:
        return
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
