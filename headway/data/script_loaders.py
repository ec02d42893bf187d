"""Inspect and modify the script's loaders."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from headway.errors import Code, UsageError


class AttributeProxy:
    """Proxy that forwards attribute access to the wrapped object, its attribute `_inner`."""

    _inner: ClassVar[str] = "_proxied"
    _proxied: Any

    def __getattr__(self, name: str) -> Any:
        if name == self._inner:  # copy and pickle look it up before it is set
            raise AttributeError(name)
        return getattr(getattr(self, self._inner), name)


class _WithoutFirst(AttributeProxy):
    """Wraps an iterable of batches, and skips its first `skip_batches` in every iteration."""

    skip_batches: int

    def __iter__(self) -> Iterator[Any]:
        return islice(self._proxied, self.skip_batches, None)

    def __len__(self) -> int:
        return max(0, len(self._proxied) - self.skip_batches)


class LoaderWithoutFirst(_WithoutFirst, DataLoader[Any]):  # type: ignore[misc]
    """Wraps a loader, and drops its first batches."""

    def __init__(self, loader: Any, skip_batches: int) -> None:
        # no super().__init__: the attributes are those of `loader`
        vars(self).update(_proxied=loader, skip_batches=skip_batches)


class SkipBatchSampler(_WithoutFirst, BatchSampler):
    """Wraps a batch sampler, and skips its first batches in every epoch."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = self._proxied = batch_sampler
        self.skip_batches = skip_batches

    @property
    def total_length(self) -> int:
        """The number of batches, including the skipped ones."""
        return len(self.batch_sampler)


def source_of(loader: DataLoader[Any]) -> Any:
    """Return the loader's batch sampler, or its sampler if it has no batch sampler."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def changed(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a copy of `loader` with changed attributes, including those that torch protects."""
    other = copy.copy(loader)
    vars(other).update({"_iterator": None} | attributes)  # the original keeps its workers
    return other


def is_of_datasets(data: Any) -> bool:
    """Return whether `data` comes from Hugging Face's `datasets` package."""
    # its iterators start over, and its epoch is in memory that loader workers share
    return type(data).__module__.partition(".")[0] == "datasets"


def is_plain(loader: Any) -> bool:
    """Return whether `loader` is a DataLoader that does not override `__iter__`."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def as_plain(loader: Any) -> Any:
    """Convert torchdata's StatefulDataLoader to a DataLoader; return other loaders unchanged."""
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    if torchdata is None or type(loader) is not torchdata.StatefulDataLoader:
        return loader
    if loader.next_iter_state is not None:
        raise UsageError(
            "a StatefulDataLoader loaded a state before it was prepared",
            where="the script's load_state_dict(...)",
            fix="prepare the loader first; save_state() and load_state() include its state",
            code=Code.NOT_PREPARED,
        )
    plain: DataLoader[Any] = DataLoader(loader.dataset)
    attributes = {name: value for name, value in vars(loader).items() if name in vars(plain)}
    vars(plain).update(attributes | {"_iterator": None})
    return plain


def batch_size_of(loader: Any) -> int:
    """Return the number of samples in a full batch; 0 if unknown."""
    sources = (loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None))
    sizes = (getattr(source, "batch_size", None) for source in sources)
    return next((size for size in sizes if isinstance(size, int)), 0)


def len_of(data: Any) -> int | None:
    """Return the length of a dataset, or None if it has no length."""
    try:
        return len(data)
    except (AttributeError, TypeError, NotImplementedError):
        return None


def samplers_of(loader: Any) -> list[Any]:
    """Return a loader's samplers, and the samplers that these wrap, without duplicates."""
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    samplers += [getattr(sampler, "sampler", None) for sampler in samplers]
    return [*{id(sampler): sampler for sampler in samplers if sampler is not None}.values()]


def distributed_sampler_of(loader: Any) -> DistributedSampler[Any] | None:
    """Return the loader's DistributedSampler, or the one that its sampler wraps, if any."""
    samplers = samplers_of(loader)
    samplers += [part for sampler in samplers for part in getattr(sampler, "__dict__", {}).values()]
    return next((sampler for sampler in samplers if isinstance(sampler, DistributedSampler)), None)


def num_repeats(loader: Any) -> int:
    """Return how many of this rank's last samples a DistributedSampler has added as padding."""
    sampler = distributed_sampler_of(loader)
    is_wrapped = all(own is not sampler for own in samplers_of(loader))
    if sampler is None or sampler.drop_last or is_wrapped:
        return 0
    repeated = sampler.total_size - len(sampler.dataset)  # type: ignore[arg-type]
    return int(sampler.rank >= sampler.num_replicas - repeated)


def split_by_rank(loader: Any, rank: int, num_ranks: int, split: bool | None) -> Any:
    """Return `loader` with only this rank's shards, or unchanged if its stream is not split.

    A stream with `num_shards` and `shard(num_shards=, index=)`, such as a stream of Hugging Face's
    `datasets`, is split if `num_shards` is divisible by the number of ranks, or if `split` is True.
    """
    stream: Any = getattr(loader, "dataset", None)
    is_stream = is_plain(loader) and isinstance(stream, IterableDataset)
    if split is False or num_ranks == 1 or not is_stream:
        return loader
    num_shards = getattr(stream, "num_shards", 0) if hasattr(stream, "shard") else 0
    if (num_shards and num_shards % num_ranks == 0) or (split and num_shards >= num_ranks):
        return changed(loader, dataset=stream.shard(num_shards=num_ranks, index=rank))
    if split:
        raise UsageError(
            f"split_streams=True, but a {type(stream).__name__} with {num_shards} shards cannot be"
            f" split over {num_ranks} ranks",
            where="the script's DataLoaderConfiguration(...)",
            fix="implement `shard(num_shards=, index=)` for at least as many shards as ranks;"
            " or remove split_streams, so that each rank reads the entire stream",
            code=Code.UNSHARDABLE,
        )
    return loader
