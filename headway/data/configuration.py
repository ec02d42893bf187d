"""Options for prepared data loaders, and checks that loaders are compatible with the options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import BatchSampler

from headway.data.script_loaders import batch_size_of, changed, distributed_sampler_of, is_plain
from headway.distributed.handler import check_call, check_range
from headway.errors import Code, UsageError


@dataclass
class DataLoaderConfiguration:
    """Options for sharding data, passed as `Accelerator(dataloader_config=...)`.

    Args:
        split_batches: the loaders' batch_size is the global batch size, not the size per rank.
        dispatch_batches: only rank 0 reads the data, and sends each rank its part. None (the
            default) does so only for loaders that override `__iter__`; False rejects such loaders.
        already_sharded: each rank's loaders already read only that rank's part of the data, for
            example with torch's DistributedSampler or a stream split by node. To resume within an
            epoch, the number of ranks must stay the same.
        split_streams: each rank reads its own shards of a stream with `num_shards` and
            `shard(num_shards=, index=)`. None (the default) enables this if the number of shards is
            divisible by the number of ranks. With False, each rank reads all shards.
        even_batches: yield the same number of batches, of the same size, on all ranks by repeating
            at most num_processes - 1 samples of the last global batch. With False, no samples are
            repeated; some ranks may get fewer samples of the last global batch, or no batch.
        use_seedable_sampler: shuffle by a seed and the epoch number only, independently of all
            other random draws.
        data_seed: the seed for `use_seedable_sampler`; overrides `Accelerator(seed=...)`. With
            None, the seed is torch's seed on rank 0; see `set_seed`.
        non_blocking: on CUDA, do not wait until a batch is copied from pinned memory. This is
            always enabled for loaders with `pin_memory=True`.
        use_stateful_dataloader: has no effect, because every prepared loader has `state_dict()` and
            `load_state_dict()`, and `save_state` saves its position.

    Raises:
        UsageError: the options are invalid or conflict.

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
    """Raise UsageError for invalid options, including those assigned after construction."""
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
            f"{other} cannot be used with {own}=True, because each rank then reads its own data",
            where="the script's DataLoaderConfiguration(...)",
            fix=f"remove {own} or {other}",
            code=Code.CONTRADICTION,
        )
    if config.data_seed is not None and not config.use_seedable_sampler:
        raise UsageError(
            f"data_seed={config.data_seed} has an effect only with use_seedable_sampler=True",
            where="the script's DataLoaderConfiguration(...)",
            fix="add use_seedable_sampler=True; or remove data_seed, and call set_seed(...)",
            code=Code.CONTRADICTION,
        )


def merged_configuration(
    config: DataLoaderConfiguration | None, split_batches: bool, global_batch_size: int | None
) -> DataLoaderConfiguration:
    """Return `config` merged with `Accelerator(split_batches=, global_batch_size=)`."""
    config, size = config or DataLoaderConfiguration(), global_batch_size
    check_configuration(config)
    if size is None:
        return replace(config, split_batches=True) if split_batches else config
    check_range("Accelerator", 1, global_batch_size=size)
    if split_batches or config.split_batches:
        raise UsageError(
            f"both global_batch_size={size} and split_batches=True define a loader's batch size",
            where="the script's Accelerator(...)",
            fix="pass only global_batch_size",
            code=Code.CONTRADICTION,
        )
    return replace(config, split_batches=True)


def micro_batch_of(global_batch_size: int, num_ranks: int, steps: int) -> int:
    """Return the global micro-batch size for `steps` gradient accumulation steps."""
    parts = num_ranks * steps
    if global_batch_size % parts:
        above = -(-global_batch_size // parts) * parts
        raise UsageError(
            f"global_batch_size={global_batch_size} is not divisible by {parts}, the product of"
            f" num_processes ({num_ranks}) and gradient_accumulation_steps ({steps})",
            where="the script's Accelerator(global_batch_size=...)",
            fix=f"pass a multiple of {parts}, such as global_batch_size={above}, or change"
            " num_processes or gradient_accumulation_steps",
            code=Code.BATCH_SIZE,
        )
    return global_batch_size // steps


def with_batches_of_ranks(
    loader: Any, micro_batch: int | None, config: DataLoaderConfiguration, num_ranks: int
) -> Any:
    """Return a loader with per-rank batches if the script has set the global batch size."""
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
    each = f"{total / num_ranks:g}" if total else "the same number of"
    raise UsageError(
        f"{setting} cannot yield batches of {each} samples on {num_ranks} ranks: the batch size of"
        f" the {type(loader).__name__} is {own or 'unknown'}",
        where=f"the script's Accelerator({setting})",
        fix=f"set the loader's batch_size to a multiple of {num_ranks}, without a batch sampler or"
        " custom __iter__; or do not pass the loader to prepare()",
        code=Code.BATCH_SIZE,
    )


def check_shardable(loader: Any, config: DataLoaderConfiguration, num_ranks: int) -> None:
    """Raise UsageError for a loader that cannot be sharded."""
    sampler = distributed_sampler_of(loader)
    if sampler is not None and max(sampler.num_replicas, num_ranks) > 1:
        if config.already_sharded and sampler.num_replicas == num_ranks:
            return
        raise UsageError(
            f"the loader has a DistributedSampler for {sampler.num_replicas} ranks, so its"
            " samples would be sharded twice",
            where="the script's prepare(...)",
            fix="pass shuffle= to the DataLoader instead of a sampler, so that prepare() shards it;"
            " or use DataLoaderConfiguration(already_sharded=True) with"
            f" {sampler.num_replicas} ranks",
            code=Code.SHARDED_TWICE,
        )
    if num_ranks == 1 or config.already_sharded:
        return
    if not is_plain(loader) and config.dispatch_batches is False:
        raise UsageError(
            f"{type(loader).__name__} overrides __iter__, so rank 0 must read it for all"
            " ranks, but dispatch_batches is False",
            where="the script's DataLoaderConfiguration(dispatch_batches=False)",
            fix="remove dispatch_batches=False; or do not prepare the loader, and have each rank"
            " read its own data",
            code=Code.UNSHARDABLE,
        )
