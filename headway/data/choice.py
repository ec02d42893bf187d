"""Which way a data loader is shared out among the ranks."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler

from headway.data.configuration import DataLoaderConfiguration
from headway.data.dispatch import DispatchedShare
from headway.data.rounds import Division
from headway.data.seeds import SampleSeeds
from headway.data.sharding import PLAIN, MapShare, Share, StreamShare, batch_size_of, is_plain
from headway.data.workers import with_lasting_workers
from headway.errors import UsageError


def share_of(
    loader: Any,
    rank: int,
    num_ranks: int,
    config: DataLoaderConfiguration,
    skip: int = 0,
    seeds: SampleSeeds | None = None,
) -> Share:
    """Return the share of `loader` that this rank reads.

    Args:
        loader: a DataLoader, or any object that iterates over batches.
        skip: batches to leave out at the beginning of each pass.
        seeds: of the samples; None leaves all generators alone.

    Raises:
        UsageError: the loader cannot be shared out.
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
