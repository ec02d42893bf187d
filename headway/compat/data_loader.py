"""The names of `accelerate.data_loader`, with its ways of sharing data out.

They fill whole batches up with repeats, where `prepare` of `headway.Accelerator` shares the last
ones out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from headway.compat.loader import (
    AcceleratedDataLoader,
    DataLoaderDispatcher,
    get_sampler,
    refuse_mesh,
    warn_of_even_batches,
)
from headway.data.active_loader import GlobalBatch, current_loop
from headway.data.configuration import DataLoaderConfiguration
from headway.data.loader import PreparedDataLoader, skip_first_batches
from headway.data.samplers import SeedableRandomSampler, SkipBatchSampler, with_seedable_sampler
from headway.data.sharding import MADE_OF, Share, batches_of
from headway.distributed.rng import synchronize_rng_states
from headway.distributed.world import rank_and_size
from headway.errors import UsageError

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]


class InvalidValueError(UsageError, ValueError):
    """A UsageError where Accelerate raises a ValueError."""


class BatchSamplerShard(BatchSampler):
    """The batches of a batch sampler that one rank gets, as many as every other rank.

    Args:
        batch_sampler: its batches are lists of indices; `batch_size` and `drop_last` are read
            from it where it has them.
        num_processes: the number of ranks.
        process_index: this rank.
        split_batches: every rank gets a part of each batch, not each num_processes-th batch.
        even_batches: fill the last batches of all ranks up with samples from the beginning. False
            gives what is left to the first ranks.

    Raises:
        InvalidValueError: a batch cannot be split into equal parts.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if split_batches:
            require_multiple(self.batch_size, num_processes)

    @property
    def total_length(self) -> int:
        """The number of batches of all ranks together."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        if self.split_batches:
            return self.total_length
        whole, rest = divmod(self.total_length, self.num_processes)
        if self.drop_last or not rest:
            return whole
        return whole + (self.even_batches or self.process_index < rest)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._parts() if self.split_batches else self._turns()

    def _parts(self) -> Iterator[list[Any]]:
        size = self.batch_size // self.num_processes
        mine = slice(self.process_index * size, (self.process_index + 1) * size)
        first: list[Any] = []
        batch: list[Any] = []
        for batch in self.batch_sampler:
            first = first or list(batch)
            if len(batch) == self.batch_size:
                yield batch[mine]
        if self.drop_last or not first or len(batch) >= self.batch_size:
            return
        if self.even_batches:
            batch = [*batch, *islice(cycle(first), self.batch_size)]
        if batch[mine]:
            yield batch[mine]

    def _turns(self) -> Iterator[list[Any]]:
        first: list[list[Any]] = []
        mine: list[Any] = []
        batch: list[Any] = []
        count = 0
        for count, batch in enumerate(self.batch_sampler, start=1):
            if count <= self.num_processes:
                first.append(batch)
            if (count - 1) % self.num_processes == self.process_index:
                mine = batch
            if count % self.num_processes == 0 and self._is_full(batch):
                yield mine
                mine = []
        if self.drop_last or not count:
            return
        if mine and (self._is_full(mine) or not self.even_batches):
            yield mine
        if self.even_batches:
            yield from self._filled_up(first, batch, count)

    def _filled_up(
        self, first: list[list[Any]], last: list[Any], count: int
    ) -> Iterator[list[Any]]:
        """Yield this rank's batch of the last round, if it is not a whole one of the script's."""
        start = count if self._is_full(last) else count - 1
        partial = [] if self._is_full(last) else last
        end = -(-count // self.num_processes) * self.num_processes
        whole_batches, samples = cycle(first), cycle(chain.from_iterable(first))
        for position in range(start, end):
            if self.batch_size is None:
                batch = next(whole_batches)
            else:
                batch = [*partial, *islice(samples, self.batch_size - len(partial))]
            partial = []
            if position % self.num_processes == self.process_index:
                yield batch

    def _is_full(self, batch: Sequence[Any]) -> bool:
        return self.batch_size is None or len(batch) == self.batch_size


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of a stream that one rank gets, as many as every other rank.

    Args:
        dataset: the stream; every rank reads all of it.
        batch_size: samples in a batch of one rank; with `split_batches` of all ranks.
        drop_last: leave the last round out if it is not whole, instead of filling it up with
            samples from the beginning.
        num_processes: the number of ranks.
        process_index: this rank.
        split_batches: every rank gets a part of each batch.

    Raises:
        InvalidValueError: a batch cannot be split into equal parts.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1:
            require_multiple(batch_size, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Number the next pass `epoch`, for the data set too."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self.batch_size * self.num_processes)
        return (whole + (rest > 0 and not self.drop_last)) * self.batch_size

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        size = self.batch_size // self.num_processes if self.split_batches else self.batch_size
        full = self.batch_size if self.split_batches else self.batch_size * self.num_processes
        mine = slice(self.process_index * size, (self.process_index + 1) * size)
        stream = iter(self.dataset)
        first: list[Any] = []
        while samples := list(islice(stream, full)):
            first = first or samples
            if len(samples) < full:
                if self.drop_last:
                    return
                samples = [*samples, *islice(cycle(first), full - len(samples))]
            yield from samples[mine]


def require_multiple(batch_size: int | None, num_processes: int) -> None:
    """Raise InvalidValueError unless batches can be split into equal parts."""
    if batch_size is None or batch_size % num_processes:
        raise InvalidValueError(
            f"split_batches=True, but batch_size {batch_size} is not a round multiple of"
            f" {num_processes} processes",
            where="the script's data loader",
            fix=f"give it a batch_size that is a multiple of {num_processes}",
        )


DataLoaderAdapter = DataLoaderStateMixin = AcceleratedDataLoader


class DataLoaderShard(AcceleratedDataLoader):
    """A DataLoader that moves batches to a device, and notices the last one.

    Its data set or batch sampler is a shard already, where there are several ranks.

    Args:
        dataset: as for `torch.utils.data.DataLoader`, which also takes `kwargs`.
        device: that of the batches; None leaves them where they are.
        rng_types: the random generators that rank 0 sets for all at the beginning of each pass:
            `torch`, `cuda`, `generator` (the next argument).
        synchronized_generator: a generator of a sampler or stream.
        skip_batches: batches to leave out at the beginning of each pass.
        use_stateful_dataloader: see `AcceleratedDataLoader`.
        torch_device_mesh: refused.
        iteration: the number of the first pass.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: Sequence[str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        refuse_mesh(torch_device_mesh)
        config = DataLoaderConfiguration(
            non_blocking=_non_blocking, use_stateful_dataloader=use_stateful_dataloader
        )
        super().__init__({"dataset": dataset, **kwargs}, config, device=device)
        self._share = _ReadAhead(self._original, skip_batches)
        self._drop_last = _drop_last
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self._passes.following = iteration

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        _synchronize(self.rng_types or (), self.synchronized_generator)
        vars(self)["remainder"] = self._samples_left_over()
        for batch in self._one_pass():
            if self.end_of_dataloader and self.remainder > 0:
                total = self.total_batch_size
                current_loop().batch = GlobalBatch(self.remainder, total, total)
            yield batch

    def without_first(self, batches: int) -> DataLoaderShard:
        """Return this loader without the first batches of each pass; see `skip_first_batches`."""
        return self._with_share(_ReadAhead(self._original, batches), batches)

    @contextmanager
    def sharing_evenly(self, even_batches: bool) -> Iterator[None]:
        """Fill whole batches up in the block, or not; streams are always filled up."""
        nested = isinstance(self.sampler, BatchSampler)
        shard: Any = self.sampler if nested else self.batch_sampler
        if not isinstance(shard, BatchSamplerShard):
            warn_of_even_batches()
            yield
            return
        before, shard.even_batches = shard.even_batches, even_batches
        try:
            yield
        finally:
            shard.even_batches = before

    def _samples_left_over(self) -> int:
        try:
            return -1 if self._drop_last else super().total_dataset_length % self.total_batch_size
        except (AttributeError, TypeError):  # a length or batch size that is not known
            return -1

    def _tell_epoch(self, epoch: int) -> None:
        super()._tell_epoch(epoch)
        inner = getattr(getattr(self.batch_sampler, "batch_sampler", None), "sampler", None)
        set_epoch = getattr(inner, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    @property
    def total_batch_size(self) -> int:
        """The number of samples in a batch of all ranks together."""
        nested = isinstance(self.sampler, BatchSampler)
        batches: Any = self.sampler if nested else self.batch_sampler
        is_split = getattr(batches, "split_batches", False)
        size: int = batches.batch_size
        return size if is_split else size * getattr(batches, "num_processes", 1)

    @property
    def total_dataset_length(self) -> int:
        """The number of samples of all ranks together; TypeError if it is not known."""
        length = getattr(self.dataset, "total_length", None)
        return super().total_dataset_length if length is None else length


class _ReadAhead(Share):
    """Loads each batch before the one before it is given: random numbers are drawn as there."""

    draws_ahead = False

    @property
    def lookahead(self) -> None:
        return None


class SkipDataLoader(AcceleratedDataLoader):
    """A DataLoader that leaves out the first batches of each pass.

    Args:
        dataset: as for `torch.utils.data.DataLoader`, which also takes `kwargs`.
        skip_batches: the number of batches to leave out.
        use_stateful_dataloader: see `AcceleratedDataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        **kwargs: Any,
    ) -> None:
        config = DataLoaderConfiguration(use_stateful_dataloader=use_stateful_dataloader)
        super().__init__({"dataset": dataset, **kwargs}, config)
        self._share = Share(self._original, skip_batches)
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._one_pass()


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[str] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> PreparedDataLoader:
    """Return a loader that gives one rank its share of the batches of another.

    Args:
        device: where `put_on_device` moves batches to.
        num_processes, process_index: None: those of the process group.
        split_batches, even_batches: see `BatchSamplerShard`.
        rng_types: see `DataLoaderShard`.
        dispatch_batches: see `DataLoaderDispatcher`; needs `put_on_device`. None: for a stream
            whose batches are put on the device.
        use_seedable_sampler, data_seed, non_blocking: see `DataLoaderConfiguration`.
        slice_fn_for_dispatch: see `DataLoaderDispatcher`.
        use_stateful_dataloader: see `AcceleratedDataLoader`.
        torch_device_mesh: refused.

    Raises:
        InvalidValueError: a batch cannot be split into equal parts, or batches are to be dispatched
            and not put on the device.
        UsageError: an argument is not supported.
    """
    is_stream = isinstance(dataloader.dataset, IterableDataset)
    if dispatch_batches is None:
        dispatch_batches = put_on_device and is_stream
    if dispatch_batches and not put_on_device:
        raise InvalidValueError(
            "dispatch_batches=True needs put_on_device=True",
            where="the script's prepare_data_loader(...)",
            fix="add put_on_device=True, or remove dispatch_batches",
        )
    rank, size = rank_and_size()
    num_ranks = size if num_processes is None else num_processes
    rank = rank if process_index is None else process_index
    if split_batches:
        batch_size = dataloader.batch_size or getattr(dataloader.batch_sampler, "batch_size", None)
        if batch_size != 1:
            require_multiple(batch_size, num_ranks)
    if use_seedable_sampler:
        dataloader = with_seedable_sampler(dataloader, data_seed)
    options: dict[str, Any] = {name: getattr(dataloader, name) for name in MADE_OF}
    options |= {
        "device": device if put_on_device else None,
        "use_stateful_dataloader": use_stateful_dataloader,
        "torch_device_mesh": torch_device_mesh,
        "_drop_last": dataloader.drop_last,
        "_non_blocking": non_blocking,
    }
    options |= batches_of(dataloader)
    if dispatch_batches:
        options |= {"slice_fn": slice_fn_for_dispatch, "generator": None}  # so there
        return DataLoaderDispatcher(split_batches=split_batches, **options)
    generator = None
    if num_ranks > 1 and is_stream:
        generator = getattr(dataloader.dataset, "generator", None)
        options |= _shard_of_stream(dataloader, num_ranks, rank, split_batches)
    elif num_ranks > 1:
        generator = None if use_seedable_sampler else _generator_of(get_sampler(dataloader))
        name = "sampler" if isinstance(dataloader.sampler, BatchSampler) else "batch_sampler"
        if name not in options:
            raise UsageError(
                "batch_size=None gives single samples, which are not shared out in batches",
                where="the script's data loader",
                fix="give it a batch_size, or a BatchSampler as its sampler",
            )
        shard = (options[name], num_ranks, rank, split_batches, even_batches)
        options[name] = BatchSamplerShard(*shard)
    kinds = [one for one in rng_types or () if one != "generator" or generator is not None]
    return DataLoaderShard(rng_types=kinds, synchronized_generator=generator, **options)


def _shard_of_stream(
    loader: DataLoader[Any], num_ranks: int, rank: int, split_batches: bool
) -> dict[str, Any]:
    """Return the arguments of a DataLoader by which it gives one rank's samples of a stream."""
    dataset: Any = loader.dataset
    datasets = sys.modules.get("datasets")  # Hugging Face's, whose streams may be in parts
    if (
        datasets is not None
        and isinstance(dataset, datasets.IterableDataset)
        and dataset.n_shards >= num_ranks
        and not split_batches
    ):
        return {"dataset": dataset.shard(num_shards=num_ranks, index=rank)}
    size = loader.batch_size
    shard = (size or 1, loader.drop_last, num_ranks, rank, split_batches)
    return {
        "dataset": IterableDatasetShard(dataset, *shard),
        "batch_size": size // num_ranks if size and split_batches else size,
    }


def _generator_of(sampler: Any) -> torch.Generator | None:
    """Return the generator of a sampler, which gets one if it may have one."""
    if not hasattr(sampler, "generator"):
        return None
    if sampler.generator is None:
        sampler.generator = torch.Generator(device=torch.get_default_device())
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    generator: torch.Generator = sampler.generator
    return generator


def _synchronize(rng_types: Sequence[str], generator: torch.Generator | None) -> None:
    """Set random generators to the state that they have on rank 0; a loader may have none."""
    has_one = generator is not None
    synchronize_rng_states([one for one in rng_types if has_one or one != "generator"], generator)
