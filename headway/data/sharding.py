"""Which rank reads which samples of a data loader, and what each global batch is made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from headway.collectives import broadcast_object_list
from headway.data.active_loader import GlobalBatch
from headway.data.streams import mark, require_one_stream
from headway.errors import UsageError

MADE_OF = (  # the arguments of a DataLoader that every share keeps
    *("dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers"),
    "pin_memory_device",  # not in_order: ranks with other orders would mix up their batches
)


Unpack = Callable[[Any], tuple[Any, GlobalBatch]]


def share_of(loader: DataLoader[Any], rank: int, num_ranks: int, split: bool) -> Share:
    """Return the share of `loader` that this rank reads.

    Raises:
        UsageError: the loader cannot be shared out.
    """
    if num_ranks == 1:
        return Share(loader)
    _refuse_what_cannot_be_shared(loader, num_ranks, split)
    if isinstance(loader.dataset, IterableDataset):
        return _StreamShare(loader, rank, num_ranks, split)
    return _MapShare(loader, rank, num_ranks, split)


class Share:
    """All of a loader: the share of the only rank."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def begin(self) -> tuple[Iterator[Any], Unpack]:
        """Begin a pass; return its items, and the function that unpacks an item."""
        full = _batch_size(self._loader)
        usual = GlobalBatch(full, full, full)

        def unpack(batch: Any) -> tuple[Any, GlobalBatch]:
            samples = full and _samples_in(batch)
            return batch, usual if samples == full else GlobalBatch(samples, samples, full)

        return iter(self._loader), unpack

    def __len__(self) -> int:
        return len(self._loader)


class _MapShare(Share):
    """Every rank draws the same samples, and loads its own."""

    def __init__(self, loader: DataLoader[Any], rank: int, num_ranks: int, split: bool) -> None:
        self._shard = _BatchShard(loader, rank, num_ranks, split)
        if loader.batch_sampler is None:
            super().__init__(_rebuilt(loader, batch_size=None, sampler=self._shard))
        else:
            super().__init__(_rebuilt(loader, batch_sampler=self._shard))

    def begin(self) -> tuple[Iterator[Any], Unpack]:
        batches = iter(self._loader)
        global_batches = self._shard.global_batches  # those of the pass that has just begun
        return batches, lambda batch: (batch, global_batches.popleft())


class _StreamShare(Share):
    """Every rank reads the whole stream, and collates its own samples."""

    def __init__(self, loader: DataLoader[Any], rank: int, num_ranks: int, split: bool) -> None:
        collate = _Collate(loader.collate_fn, is_batched=loader.batch_size is not None)
        self._stream = _Stream(loader, rank, num_ranks, split)
        super().__init__(
            _rebuilt(loader, dataset=self._stream, batch_size=None, collate_fn=collate)
        )

    def begin(self) -> tuple[Iterator[Any], Unpack]:
        return self._parts(), lambda part: (part.samples, part.batch)

    def _parts(self) -> Iterator[_Part]:
        for part in self._loader:
            require_one_stream(part.mark)
            yield part
        require_one_stream(None)

    def __len__(self) -> int:
        return self._stream.count_batches()


class _BatchShard:
    """A batch sampler that gives one rank its share of another batch sampler's batches."""

    def __init__(self, loader: DataLoader[Any], rank: int, num_ranks: int, split: bool) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._num_batches = 1 if split else num_ranks  # that make a global batch
        # without a batch sampler each of the sampler's items is a batch
        self._is_batched = loader.batch_sampler is not None or isinstance(
            loader.sampler, BatchSampler
        )
        self._source: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._size = _batch_size(loader) if self._is_batched else 1
        self._drop_last = bool(getattr(self._source, "drop_last", False))
        self._generators = _Generators(self._source, getattr(self._source, "sampler", None))
        self.global_batches: deque[GlobalBatch] = deque()

    def __len__(self) -> int:
        return _global_batches(len(self._source), self._num_batches, self._drop_last)

    def __iter__(self) -> Iterator[Any]:
        self.global_batches = deque()
        return self._shares(self.global_batches)

    def _shares(self, global_batches: deque[GlobalBatch]) -> Iterator[Any]:
        self._generators.agree()
        try:
            source = iter(self._source if self._is_batched else ([one] for one in self._source))
            first: list[Any] = []
            while batches := list(islice(source, self._num_batches)):
                if self._drop_last and len(batches) < self._num_batches:
                    return
                samples = list(chain.from_iterable(batches))
                first = first or samples
                if not self._size and len(batches) == self._num_ranks:
                    size = len(samples)
                    global_batches.append(GlobalBatch(size, size, is_even=False))
                    yield batches[self._rank]  # their sizes are the script's own
                    continue
                full = self._size * self._num_batches
                mine, batch = _share(samples, self._rank, self._num_ranks, first, full)
                global_batches.append(batch)
                yield mine if self._is_batched else mine[0]
        finally:
            self._generators.restore()


class _Stream(IterableDataset[Any]):
    """A stream that gives one rank its share of another stream's samples, a batch at a time."""

    def __init__(self, loader: DataLoader[Any], rank: int, num_ranks: int, split: bool) -> None:
        self._stream = loader.dataset
        self._rank, self._num_ranks = rank, num_ranks
        self._full = (loader.batch_size or 1) * (1 if split else num_ranks)  # global batch size
        self._drop_last = bool(loader.drop_last)

    def __iter__(self) -> Iterator[_Part]:
        stream = iter(self._stream)
        first: list[Any] = []
        while samples := list(islice(stream, self._full)):
            if self._drop_last and len(samples) < self._full:
                return
            seen = 0 if first else mark(samples)
            first = first or samples
            yield _Part(*_share(samples, self._rank, self._num_ranks, first, self._full), seen)

    def count_batches(self) -> int:
        # no __len__: torch would warn when workers, each with a last batch, give more batches
        return _global_batches(len(self._stream), self._full, self._drop_last)  # type: ignore[arg-type]


def _global_batches(items: int, per_batch: int, drop_last: bool) -> int:
    return items // per_batch if drop_last else -(-items // per_batch)


class _Part(NamedTuple):
    """One rank's samples of a global batch, and the `mark` of a stream's first one."""

    samples: Any
    batch: GlobalBatch
    mark: int = 0


def _share(
    samples: list[Any], rank: int, num_ranks: int, spare: list[Any], full: int
) -> tuple[list[Any], GlobalBatch]:
    """Return this rank's even share of `samples`, filled up from `spare`."""
    mine, batch = _share_of_size(len(samples), rank, num_ranks, full)
    if batch.padded > batch.samples:
        samples = samples + list(islice(cycle(spare), batch.padded - batch.samples))
    return samples[mine], batch


@lru_cache(maxsize=64)  # nearly all batches have one size
def _share_of_size(samples: int, rank: int, num_ranks: int, full: int) -> tuple[slice, GlobalBatch]:
    size = -(-samples // num_ranks)
    return slice(rank * size, (rank + 1) * size), GlobalBatch(samples, size * num_ranks, full)


class _Collate:
    """Collates a part's samples; a class, so that loader workers can be sent it."""

    def __init__(self, collate: Callable[[Any], Any], is_batched: bool) -> None:
        self._collate = collate
        self._is_batched = is_batched

    def __call__(self, part: _Part) -> _Part:
        samples = part.samples if self._is_batched else part.samples[0]
        return part._replace(samples=self._collate(samples))


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
            for sampler, state in zip(self._samplers, broadcast_object_list(states), strict=True):
                sampler.generator.set_state(state)

    def restore(self) -> None:
        for sampler in self._unseeded:
            sampler.generator = None


def _rebuilt(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a loader like `loader`, but for `changes`."""
    return DataLoader(**{**{name: getattr(loader, name) for name in MADE_OF}, **changes})


def _batch_size(loader: DataLoader[Any]) -> int:
    """Return how many samples a full batch of `loader` has; 0 if that is not known."""
    source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sizes = (loader.batch_size, getattr(source, "batch_size", None))
    return next((size for size in sizes if isinstance(size, int)), 0)


def _samples_in(batch: Any) -> int:
    """Return the length of the first tensor in `batch`; 0 if there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else 0
    if not isinstance(batch, (list, tuple)):
        batch = batch.values() if isinstance(batch, Mapping) else ()
    for one in batch:
        if size := _samples_in(one):
            return size
    return 0


def _refuse_what_cannot_be_shared(loader: DataLoader[Any], num_ranks: int, split: bool) -> None:
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UsageError(
            f"{type(loader).__name__} has an __iter__ of its own, which cannot be shared out",
            where="the script's prepare(...)",
            fix="prepare a plain DataLoader: what __iter__ did goes into collate_fn or into the"
            " loop; or leave the loader out of prepare(), and let each rank read its own data",
        )
    if isinstance(loader.sampler, DistributedSampler):
        raise UsageError(
            "the loader has a DistributedSampler, so its samples would be shared out twice",
            where="the script's prepare(...)",
            fix="give the DataLoader shuffle=True (or False) and no sampler; prepare() shares out",
        )
    if split and (loader.batch_size is None or loader.batch_size % num_ranks):
        raise UsageError(
            f"split_batches=True, but batch_size {loader.batch_size} cannot be split"
            f" over {num_ranks} ranks",
            where="the script's Accelerator(split_batches=True)",
            fix=f"give the DataLoader a batch_size that is a multiple of {num_ranks}",
        )
