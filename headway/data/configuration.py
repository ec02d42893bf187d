"""How prepared loaders share their data out among the ranks: `DataLoaderConfiguration`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import BatchSampler

from headway.data.script_loaders import batch_size_of, changed, distributed_sampler_of, is_plain
from headway.distributed.handler import check_call, check_range
from headway.errors import UsageError


@dataclass
class DataLoaderConfiguration:
    """How prepared data loaders share their data out: `Accelerator(dataloader_config=...)`.

    Args:
        split_batches: the loaders' batch_size is that of all ranks together, not of each.
        dispatch_batches: rank 0 alone reads the data, and sends each rank its share. None (the
            default) does so for loaders with an `__iter__` of their own only. False refuses these.
        already_sharded: each rank's loaders read its own part of the data, as with torch's
            DistributedSampler or a stream that is split by node: they are read as they are. A run
            that resumes within an epoch needs as many ranks.
        split_streams: each rank reads its own shards of a stream with `num_shards` and
            `shard(num_shards=, index=)`. None (the default) does so where the ranks divide the
            shards evenly, True also where they do not; False has each rank read all of it.
        even_batches: give all ranks equally many batches of equally many samples; at most
            num_processes - 1 samples of the last round are repeated for that. False repeats none:
            in the last round ranks may get fewer samples than others, or no batch.
        use_seedable_sampler: shuffle by a seed and the number of the epoch alone, whatever else
            has drawn random numbers before.
        data_seed: that seed, also beside `Accelerator(seed=...)`; None takes the one of torch
            (`set_seed`), that of rank 0.
        non_blocking: on CUDA, do not wait for the copy of a batch from pinned memory. Loaders with
            `pin_memory=True` do so in any case.
        use_stateful_dataloader: changes nothing: every prepared loader has `state_dict()` and
            `load_state_dict()`, and `save_state` saves where it is.

    Raises:
        UsageError: an option cannot be obeyed.

    Examples:
        >>> from headway import Accelerator, DataLoaderConfiguration
        >>> config = DataLoaderConfiguration(even_batches=False)
        >>> Accelerator(cpu=True, dataloader_config=config).even_batches
        False
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    already_sharded: bool = False
    split_streams: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self) -> None:
        check_configuration(self)


def check_configuration(config: DataLoaderConfiguration) -> None:
    """Raise a UsageError for options that cannot be obeyed; they may have been set since."""
    check_call(type(config).__init__, (), vars(config))
    own = "already_sharded" if config.already_sharded else "split_streams"
    others = {
        "dispatch_batches=True": config.dispatch_batches,
        "split_batches=True": config.split_batches,
        "even_batches=False": not config.even_batches,
    }
    other = next((name for name, is_set in others.items() if is_set), None)
    if other is not None and getattr(config, own):
        raise UsageError(
            f"{own}=True has each rank read its own data, and {other} cannot be obeyed",
            where="the script's DataLoaderConfiguration(...)",
            fix=f"remove one of the two: {own}, or {other}",
        )
    if config.data_seed is not None and not config.use_seedable_sampler:
        raise UsageError(
            f"data_seed={config.data_seed} has an effect only with use_seedable_sampler=True",
            where="the script's DataLoaderConfiguration(...)",
            fix="add use_seedable_sampler=True; or remove data_seed, and call set_seed(...)",
        )


def merged_configuration(
    config: DataLoaderConfiguration | None, split_batches: bool, global_batch_size: int | None
) -> DataLoaderConfiguration:
    """Return `config` with what `Accelerator(split_batches=, global_batch_size=)` adds to it."""
    config, size = config or DataLoaderConfiguration(), global_batch_size
    check_configuration(config)
    if size is None:
        return replace(config, split_batches=True) if split_batches else config
    check_range("Accelerator", 1, global_batch_size=size)
    if split_batches or config.split_batches:
        raise UsageError(
            f"both global_batch_size={size} and split_batches=True say what a loader's batch size"
            " is",
            where="the script's Accelerator(...)",
            fix="pass global_batch_size alone",
        )
    return replace(config, split_batches=True)


def micro_batch_of(global_batch_size: int, num_ranks: int, steps: int) -> int:
    """Return the number of samples in a micro-batch of all ranks together, of `steps` in a step."""
    parts = num_ranks * steps
    if global_batch_size % parts:
        above = -(-global_batch_size // parts) * parts
        raise UsageError(
            f"global_batch_size={global_batch_size} is not divisible by {parts}: num_processes"
            f" {num_ranks} times gradient_accumulation_steps {steps}",
            where="the script's Accelerator(global_batch_size=...)",
            fix=f"pass a multiple of {parts}, as global_batch_size={above}, or change num_processes"
            " or gradient_accumulation_steps",
        )
    return global_batch_size // steps


def with_batches_of_ranks(
    loader: Any, micro_batch: int | None, config: DataLoaderConfiguration, num_ranks: int
) -> Any:
    """Return a loader with batches of one rank, where their size is given for all together."""
    if micro_batch is None and (num_ranks == 1 or not config.split_batches):
        return loader
    own = batch_size_of(loader)
    total = micro_batch or own
    size, batches = total // num_ranks, getattr(loader, "batch_sampler", None)
    if total and total % num_ranks == 0 and (is_plain(loader) or num_ranks == 1):
        if own == size:
            return loader
        if is_plain(loader) and type(batches) is BatchSampler:
            batches = BatchSampler(batches.sampler, size, batches.drop_last)
            return changed(loader, batch_sampler=batches, batch_size=loader.batch_size and size)
    setting = "global_batch_size=..." if micro_batch else "split_batches=True"
    each = f"{total / num_ranks:g}" if total else "equally many"
    raise UsageError(
        f"{setting} cannot give {num_ranks} ranks batches of {each} samples: the batch size of the"
        f" {type(loader).__name__} is {own or 'not known'}",
        where=f"the script's Accelerator({setting})",
        fix=f"give it a batch_size that is a multiple of {num_ranks}, in place of a batch sampler"
        " or an __iter__ of its own, or leave it out of prepare()",
    )


def check_shardable(loader: Any, config: DataLoaderConfiguration, num_ranks: int) -> None:
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
    if not is_plain(loader) and config.dispatch_batches is False:
        raise UsageError(
            f"{type(loader).__name__} has an __iter__ of its own, which only rank 0 can run for"
            " all ranks, but dispatch_batches is False",
            where="the script's DataLoaderConfiguration(dispatch_batches=False)",
            fix="leave dispatch_batches out; or leave the loader out of prepare(), and let each"
            " rank read its own data",
        )
