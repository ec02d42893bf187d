"""Which rank reads which samples of a data loader, and what each batch is made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from headway.collectives import broadcast_object_list
from headway.contract.run import Ranks
from headway.data.active_loader import Round
from headway.data.streams import mark, require_one_stream
from headway.errors import UsageError

MADE_OF = (  # the arguments of a DataLoader that every share keeps
    *("dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers"),
    "pin_memory_device",  # not in_order: ranks that disagree on the order would mix up their rounds
)


def share_out(loader: DataLoader[Any], ranks: Ranks, split: bool) -> Share:
    """Return the share of `loader` that this rank reads.

    Raises:
        UsageError: the loader cannot be shared out.
    """
    if ranks.world_size == 1:
        return Share(loader)
    _refuse_what_cannot_be_shared(loader, ranks, split)
    if isinstance(loader.dataset, IterableDataset):
        return _StreamShare(loader, ranks, split)
    return _MapShare(loader, ranks, split)


class Share:
    """All of a loader: the share of a rank that is alone."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[tuple[Any, Round]]:
        size = _batch_size(self._loader)
        for batch in self._loader:
            samples = _samples_in(batch) if size else 0
            yield batch, Round(samples, samples, size)

    def __len__(self) -> int:
        return len(self._loader)


class _MapShare(Share):
    """Every rank draws the same samples, and loads its own."""

    def __init__(self, loader: DataLoader[Any], ranks: Ranks, split: bool) -> None:
        self._shard = _BatchShard(loader, ranks, split)
        if loader.batch_sampler is None:
            super().__init__(_rebuilt(loader, batch_size=None, sampler=self._shard))
        else:
            super().__init__(_rebuilt(loader, batch_sampler=self._shard))

    def __iter__(self) -> Iterator[tuple[Any, Round]]:
        batches = iter(self._loader)
        rounds = self._shard.rounds  # those of the pass that has just begun
        for batch in batches:
            yield batch, rounds.popleft()


class _StreamShare(Share):
    """Every rank reads the whole stream, and collates its own samples."""

    def __init__(self, loader: DataLoader[Any], ranks: Ranks, split: bool) -> None:
        collate = _Collate(loader.collate_fn, is_batched=loader.batch_size is not None)
        self._stream = _Stream(loader, ranks, split)
        super().__init__(
            _rebuilt(loader, dataset=self._stream, batch_size=None, collate_fn=collate)
        )

    def __iter__(self) -> Iterator[tuple[Any, Round]]:
        parts = iter(self._loader)
        while True:
            part = next(parts, None)
            require_one_stream(None if part is None else part.mark)
            if part is None:
                return
            yield part.samples, part.round

    def __len__(self) -> int:
        return self._stream.count_rounds()


class _BatchShard:
    """A batch sampler that gives one rank its share of another batch sampler's batches."""

    def __init__(self, loader: DataLoader[Any], ranks: Ranks, split: bool) -> None:
        self._ranks = ranks
        self._round = 1 if split else ranks.world_size  # batches that all ranks take together
        # without a batch sampler each of the sampler's items is a batch
        self._is_batched = loader.batch_sampler is not None or isinstance(
            loader.sampler, BatchSampler
        )
        self._source: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._size = _batch_size(loader) if self._is_batched else 1
        self._drop_last = bool(getattr(self._source, "drop_last", False))
        self._generators = _Generators(self._source, getattr(self._source, "sampler", None))
        self.rounds: deque[Round] = deque()

    def __len__(self) -> int:
        return _rounds(len(self._source), self._round, self._drop_last)

    def __iter__(self) -> Iterator[Any]:
        self.rounds = deque()
        return self._shares(self.rounds)

    def _shares(self, rounds: deque[Round]) -> Iterator[Any]:
        self._generators.agree()
        try:
            batches = iter(self._source if self._is_batched else ([one] for one in self._source))
            first: list[Any] = []
            while batches_of_round := list(islice(batches, self._round)):
                if self._drop_last and len(batches_of_round) < self._round:
                    return
                samples = list(chain.from_iterable(batches_of_round))
                first = first or samples
                if not self._size and len(batches_of_round) == self._ranks.world_size:
                    rounds.append(Round(len(samples), len(samples), is_even=False))
                    yield batches_of_round[self._ranks.rank]  # their sizes are the script's own
                    continue
                part = _share(samples, self._ranks, first, self._size * self._round)
                rounds.append(part.round)
                yield part.samples if self._is_batched else part.samples[0]
        finally:
            self._generators.restore()


class _Stream(IterableDataset[Any]):
    """A stream that gives one rank its share of another stream's samples, a batch at a time."""

    def __init__(self, loader: DataLoader[Any], ranks: Ranks, split: bool) -> None:
        self._stream = loader.dataset
        self._ranks = ranks
        self._round = (loader.batch_size or 1) * (1 if split else ranks.world_size)  # samples
        self._drop_last = bool(loader.drop_last)

    def __iter__(self) -> Iterator[_Part]:
        samples = iter(self._stream)
        first: list[Any] = []
        while samples_of_round := list(islice(samples, self._round)):
            if self._drop_last and len(samples_of_round) < self._round:
                return
            seen = 0 if first else mark(samples_of_round)
            first = first or samples_of_round
            part = _share(samples_of_round, self._ranks, first, self._round)
            yield part._replace(mark=seen)

    def count_rounds(self) -> int:
        # no __len__: torch would warn when workers, each with a last round, give more batches
        return _rounds(len(self._stream), self._round, self._drop_last)  # type: ignore[arg-type]


def _rounds(items: int, per_round: int, drop_last: bool) -> int:
    return items // per_round if drop_last else -(-items // per_round)


class _Part(NamedTuple):
    """One rank's samples of a round, and the `mark` of a stream's first round."""

    samples: Any
    round: Round
    mark: int = 0


def _share(samples: list[Any], ranks: Ranks, spare: list[Any], full: int) -> _Part:
    """Return this rank's even share of `samples`, filled up from `spare`."""
    size = -(-len(samples) // ranks.world_size)
    total = size * ranks.world_size
    filled = samples + list(islice(cycle(spare), total - len(samples)))
    return _Part(filled[ranks.rank * size :][:size], Round(len(samples), total, full))


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
    """Return how many samples a whole batch of `loader` has; 0 if that is nowhere said."""
    source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sizes = (loader.batch_size, getattr(source, "batch_size", None))
    return next((size for size in sizes if isinstance(size, int)), 0)


def _samples_in(batch: Any) -> int:
    """Return the length of the first tensor in `batch`; 0 if there is none."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else 0
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if not isinstance(batch, (list, tuple)):
        return 0
    return next((size for size in map(_samples_in, batch) if size), 0)


def _refuse_what_cannot_be_shared(loader: DataLoader[Any], ranks: Ranks, split: bool) -> None:
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UsageError(
            f"{type(loader).__name__} has an __iter__ of its own, which ranks cannot share out",
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
    if split and (loader.batch_size is None or loader.batch_size % ranks.world_size):
        raise UsageError(
            f"split_batches=True, but batch_size {loader.batch_size} cannot be split"
            f" over {ranks.world_size} ranks",
            where="the script's Accelerator(split_batches=True)",
            fix=f"give the DataLoader a batch_size that is a multiple of {ranks.world_size}",
        )
