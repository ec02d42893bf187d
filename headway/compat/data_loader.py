"""The names of `accelerate.data_loader`, with its ways of sharing data out.

They fill whole batches up with repeats, where `prepare` of `headway.Accelerator` shares the last
ones out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from headway.compat.shards import (
    BatchSamplerShard,
    InvalidValueError,
    IterableDatasetShard,
    require_multiple,
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
