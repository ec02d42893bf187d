"""Data loaders that give each rank its own share of every batch, on its own device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from headway.accumulation import Accumulation, Reading
from headway.collectives import broadcast_object_list, send_to_device
from headway.contract import Ranks
from headway.errors import UsageError


class PreparedDataLoader(DataLoader[Any]):
    """The script's loader, of which each rank reads its own share.

    Rank r of w gets batches r, r + w, ... (with `split_batches`: the r-th part of every batch). All
    ranks get equally many batches of equally many samples: the last round of batches, if it is not
    whole, is shared out evenly, and up to w - 1 samples from the epoch's beginning are repeated
    (`drop_last` drops that round instead). So the mean over ranks of mean losses is the mean over
    the samples. `gather_for_metrics` leaves the repeated samples out again.

    Shuffling draws the same permutation on all ranks, and the same as one process would with the
    same seed. A sampler of the script's own has to agree on all ranks: by its seed, or through a
    `generator` attribute, which is then kept equal. A stream (`IterableDataset`) is read as a whole
    by every rank, and has to be the same on all of them.

    The script's loader answers for all other attributes: `dataset`, `batch_size`, `sampler`, ...
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        ranks: Ranks,
        accumulation: Accumulation,
        *,
        split_batches: bool = False,
        device: torch.device | None = None,
    ) -> None:
        # no super().__init__: the attributes are those of `loader`, the batches those of `_inner`
        self._original = loader
        self._inner = _shared_out(loader, ranks, split_batches)
        self._accumulation = accumulation
        self._device = device

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        with self._accumulation.reading() as reading:
            batches = iter(self._inner)
            following = next(batches, _END)
            while following is not _END:
                batch, following = following, next(batches, _END)  # look one batch ahead
                reading.is_last = following is _END
                batch = self._counted(batch, reading)
                self._accumulation.gave_batch(reading)
                yield self._moved(batch)

    def __len__(self) -> int:
        if isinstance(self._inner.dataset, _Stream):
            return self._inner.dataset.count_rounds()
        return len(self._inner)

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to the sampler, batch sampler and data set, as far as they ask for it."""
        sources = (self._original.sampler, self._original.batch_sampler, self._original.dataset)
        for source in sources:
            if callable(getattr(source, "set_epoch", None)):
                source.set_epoch(epoch)  # type: ignore[union-attr]

    def __getattr__(self, name: str) -> Any:
        if "_original" not in self.__dict__:  # a copy in the making
            raise AttributeError(name)
        return getattr(self._original, name)

    def _counted(self, batch: Any, reading: Reading) -> Any:
        if isinstance(batch, _Part):
            reading.real, reading.total = batch.real, batch.total
            return batch.samples
        for shard in (self._inner.batch_sampler, self._inner.sampler):
            if reading.is_last and isinstance(shard, _BatchShard):
                reading.real, reading.total = shard.last_real, shard.last_total
        return batch

    def _moved(self, batch: Any) -> Any:
        if self._device is None:
            return batch
        return send_to_device(batch, self._device, non_blocking=self._device.type == "cuda")


_END = object()


def _shared_out(loader: DataLoader[Any], ranks: Ranks, split: bool) -> DataLoader[Any]:
    """Return a loader of this rank's share; `loader` itself if there is one rank only."""
    if ranks.world_size == 1:
        return loader
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
    if isinstance(loader.dataset, IterableDataset):
        collate = _Collate(loader.collate_fn, is_batched=loader.batch_size is not None)
        stream = _Stream(loader, ranks, split)
        return _rebuilt(loader, dataset=stream, batch_size=None, collate_fn=collate)
    shard = _BatchShard(loader, ranks, split)
    if loader.batch_sampler is None:
        return _rebuilt(loader, batch_size=None, sampler=shard)
    return _rebuilt(loader, batch_sampler=shard)


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
        self._drop_last = bool(getattr(self._source, "drop_last", False))
        self._generators = _Generators(self._source, getattr(self._source, "sampler", None))
        self.last_real = self.last_total = 0

    def __len__(self) -> int:
        return _rounds(len(self._source), self._round, self._drop_last)

    def __iter__(self) -> Iterator[Any]:
        self._generators.agree()
        batches = iter(self._source if self._is_batched else ([one] for one in self._source))
        first: list[Any] = []
        while batches_of_round := list(islice(batches, self._round)):
            if self._drop_last and len(batches_of_round) < self._round:
                return
            samples = list(chain.from_iterable(batches_of_round))
            first = first or samples
            part = _share(samples, self._ranks, first)
            self.last_real, self.last_total = part.real, part.total
            if self._sizes_are_the_scripts_own(batches_of_round):
                yield batches_of_round[self._ranks.rank]
            else:
                yield part.samples if self._is_batched else part.samples[0]

    def _sizes_are_the_scripts_own(self, batches_of_round: list[Any]) -> bool:
        has_size = isinstance(getattr(self._source, "batch_size", None), int)
        return self._is_batched and not has_size and len(batches_of_round) == self._ranks.world_size


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
            first = first or samples_of_round
            yield _share(samples_of_round, self._ranks, first)

    def count_rounds(self) -> int:
        # no __len__: torch would warn when workers, each with a last round, give more batches
        return _rounds(len(self._stream), self._round, self._drop_last)  # type: ignore[arg-type]


def _rounds(items: int, per_round: int, drop_last: bool) -> int:
    return items // per_round if drop_last else -(-items // per_round)


class _Part(NamedTuple):
    """One rank's samples of a round; of the round's `total` samples `real` are no repeats."""

    samples: Any
    real: int
    total: int


def _share(samples: list[Any], ranks: Ranks, spare: list[Any]) -> _Part:
    """Return this rank's even share of `samples`, filled up from `spare`."""
    size = -(-len(samples) // ranks.world_size)
    total = size * ranks.world_size
    filled = samples + list(islice(cycle(spare), total - len(samples)))
    return _Part(filled[ranks.rank * size :][:size], len(samples), total)


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


def _rebuilt(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a loader like `loader`, but for `changes`."""
    names: Iterable[str] = (
        "dataset",
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
        "prefetch_factor",
        "persistent_workers",
        "pin_memory_device",
        "in_order",
    )
    return DataLoader(**{**{name: getattr(loader, name) for name in names}, **changes})
