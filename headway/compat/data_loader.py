"""The loaders of `accelerate.data_loader`, which shard, sample and resume as Accelerate does.

Incomplete final batches are padded with repeated samples; `headway.Accelerator` distributes the
remaining samples instead.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from headway.compat.samplers import BatchSamplerShard, IterableDatasetShard, require_multiple
from headway.compat.samplers import SeedableRandomSampler as SeedableRandomSampler
from headway.data.active_loader import LOOP, GlobalBatch, LoaderLoop, TrainingLoader, open_loops
from headway.data.batch_sources import samples_in
from headway.data.loader import skip_first_batches as skip_first_batches
from headway.data.script_loaders import AttributeProxy, SkipBatchSampler, changed, source_of
from headway.data.workers import starting_workers, with_shielded_workers
from headway.devices.table import kind_of
from headway.distributed import nested
from headway.distributed.call_barrier import named_call
from headway.distributed.collectives import broadcast_object_list
from headway.distributed.rng import synchronize_rng_states
from headway.distributed.world import rank_and_size
from headway.errors import Code, UsageError
from headway.ipc.progress import process_progress
from headway.ipc.step_clock import DATA, SCRIPT
from headway.state import GradientState

_COPIED = (  # without in_order: ranks must not reorder batches differently
    *("dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers"),
    "pin_memory_device",
)


class DataLoaderShard(AttributeProxy, TrainingLoader):
    """A DataLoader that moves batches to a device, detects the last batch and counts epochs.

    With several ranks, the dataset or batch sampler must already be a shard. An epoch is counted
    when it is complete; an epoch of a loader from `skip_first_batches` is not counted for the
    original loader. Other attributes are read from `base_dataloader`.

    With `use_stateful_dataloader`, `base_dataloader` is a StatefulDataLoader from torchdata. This
    loader then has the same methods, `isinstance` accepts it as a StatefulDataLoader, and
    checkpoints include its state.

    Args:
        dataset: The dataset, passed to `torch.utils.data.DataLoader` together with `kwargs`.
        device: Device to move batches to. None leaves them in place.
        rng_types: Random number generators to synchronize from rank 0 at the start of each epoch:
            `torch`, `cuda` or `generator` (see the next argument).
        synchronized_generator: Generator of a sampler or stream.
        skip_batches: Number of batches to skip at the start of each epoch.
        use_stateful_dataloader: See above.
    """

    _inner = "base_dataloader"
    end_of_dataloader = False
    remainder = -1

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
        **kwargs: Any,
    ) -> None:
        # no super().__init__: the attributes are those of `base_dataloader`
        kind: Any = _stateful_class() if use_stateful_dataloader else DataLoader
        self.base_dataloader = with_shielded_workers(kind(dataset, **kwargs))
        self.device, self.skip_batches, self.iteration = device, skip_batches, 0
        self.rng_types, self.synchronized_generator = rng_types or (), synchronized_generator
        self.use_stateful_dataloader, self.gradient_state = use_stateful_dataloader, GradientState()
        self._drop_last, self._non_blocking = _drop_last, _non_blocking
        self._state: dict[str, Any] = {}  # torchdata's, after the last batch or as loaded

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return _stateful_class() if vars(self).get("use_stateful_dataloader", False) else type(self)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        own = {"state_dict": self._state_dict, "load_state_dict": self._load_state_dict}
        return own.get(name, found)

    def __len__(self) -> int:
        return max(0, len(self.base_dataloader) - self.skip_batches)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        progress, loop, given = process_progress(), LoaderLoop(self), 0
        kinds = [rng for rng in self.rng_types if self.synchronized_generator or rng != "generator"]
        with named_call(LOOP):
            synchronize_rng_states(kinds, self.synchronized_generator)
        self.end_of_dataloader, self.remainder = False, -1
        self.set_epoch(self.iteration)
        try:
            progress.clock.enter(DATA)
            progress.clock.num_workers = self.num_workers
            with starting_workers(self.base_dataloader):
                items = self._items()
            following = next(items, None)
            while following is not None:
                batch, global_batch = following
                if self.device is not None:
                    batch = nested.send_to_device(batch, self.device, self._non_blocking)
                state, following = self._position(), next(items, None)  # one batch ahead
                if following is None:
                    self.end_of_dataloader = True
                    global_batch = self._last(global_batch)._replace(is_last=True)
                    state = self._position()
                self._state, given = state, given + 1
                if given > self.skip_batches:
                    progress.begin_forward(samples_in(batch))
                    loop.begin_batch(global_batch)
                    yield batch
                    progress.clock.enter(DATA)
            self.iteration += given > 0
        finally:
            progress.clock.enter(SCRIPT)
            loop.end()

    def _items(self) -> Iterator[tuple[Any, GlobalBatch]]:
        if not self._drop_last:
            with suppress(AttributeError, TypeError, NotImplementedError):  # no length or size
                self.remainder = self.total_dataset_length % self.total_batch_size
        return ((batch, GlobalBatch()) for batch in iter(self.base_dataloader))

    def _last(self, batch: GlobalBatch) -> GlobalBatch:
        """Return the sizes of the last global batch."""
        if self.remainder <= 0:
            return batch
        return GlobalBatch(self.remainder, self.total_batch_size, self.total_batch_size)

    # ------------------------------------------------------------------ position

    def _position(self) -> dict[str, Any]:
        if not self.use_stateful_dataloader:
            return {}
        return {**self.base_dataloader.state_dict(), "_iterator_finished": self.end_of_dataloader}

    def _state_dict(self) -> dict[str, Any]:
        return self._state or self._position()

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state
        self.base_dataloader.load_state_dict(state)

    @property
    def epoch(self) -> int:
        return self.iteration + any(loop.loader is self and loop.is_last for loop in open_loops())

    def position(self) -> dict[str, Any]:
        seed = getattr(get_sampler(self), "initial_seed", None)
        return {"epoch": self.epoch, "seed": seed, "state": self._state}

    def seek(self, position: dict[str, Any]) -> None:
        self.iteration = position["epoch"]
        if position["seed"] is not None:
            get_sampler(self).initial_seed = position["seed"]
        if position["state"]:
            self._load_state_dict(position["state"])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch number for the next iteration, the samplers and the dataset."""
        self.iteration, batches = epoch, _batches_of(self)
        for part in (batches, getattr(batches, "sampler", None), self.sampler, self.dataset):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)

    # ------------------------------------------------------------------ variants

    @contextmanager
    def override_even_batches(self, even_batches: bool) -> Iterator[None]:
        shard = _batches_of(self)
        if not isinstance(shard, BatchSamplerShard):  # streams and dispatched data
            warnings.warn("even_batches is only supported for map-style datasets", stacklevel=2)
            yield
            return
        before, shard.even_batches = shard.even_batches, even_batches
        try:
            yield
        finally:
            shard.even_batches = before

    def without_first(self, batches: int) -> DataLoaderShard:
        other = copy.copy(self)
        other.use_stateful_dataloader = False
        options, name = _options_of(self.base_dataloader)
        if isinstance(self.dataset, IterableDataset):
            other.skip_batches += batches
        else:
            options[name] = SkipBatchSampler(options[name], batches)
        other.base_dataloader = DataLoader(**options)
        return other

    @property
    def total_batch_size(self) -> int:
        """The number of samples in a global batch."""
        batches = _batches_of(self)
        is_split, size = getattr(batches, "split_batches", False), batches.batch_size
        return int(size if is_split else size * getattr(batches, "num_processes", 1))

    @property
    def total_dataset_length(self) -> int:
        """The number of samples over all ranks; raises TypeError if unknown."""
        data: Any = self.dataset
        return len(data) if (length := getattr(data, "total_length", None)) is None else int(length)


DataLoaderAdapter = DataLoaderStateMixin = DataLoaderShard


class SkipDataLoader(DataLoaderShard):
    """A DataLoader that skips the first batches of each epoch; see `DataLoaderShard`."""

    def __init__(self, dataset: Any, skip_batches: int = 0, **kwargs: Any) -> None:
        super().__init__(dataset, skip_batches=skip_batches, **kwargs)


class DataLoaderDispatcher(DataLoaderShard):
    """A DataLoader that only rank 0 reads; each rank takes its slice of the broadcast batches.

    The batches of a round are concatenated and split into equal parts. The last part is padded
    with the first samples of the epoch. Batches must be tensors, possibly nested, with shapes that
    can be concatenated.

    Args:
        dataset, skip_batches, kwargs: see `DataLoaderShard`.
        split_batches: Split each batch among the ranks, instead of reading one batch per rank.
    """

    def __init__(
        self, dataset: Any, split_batches: bool = False, skip_batches: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(dataset, skip_batches=skip_batches, **kwargs)
        self.split_batches = split_batches
        self._rank, self._size = rank_and_size()
        self._iterated: Any = None  # the loader with a started epoch
        self._num_batches = 1 if split_batches else self._size  # in a round

    def __len__(self) -> int:
        whole, rest = divmod(len(self.base_dataloader), self._num_batches)
        return max(0, whole + (rest > 0 and not self._drop_last) - self.skip_batches)

    def _items(self) -> Iterator[tuple[Any, GlobalBatch]]:
        loader = self.base_dataloader
        if self._rank == 0:
            return self._parts(self._rounds(iter(loader)))
        # advance the random number generators as on rank 0, which iterates the loader
        if not (loader.persistent_workers and self._iterated is loader):
            iter(changed(loader, num_workers=0, timeout=0))  # draws the workers' seed
        self._iterated = loader
        if loader.num_workers and not isinstance(loader.dataset, IterableDataset):
            list(islice(source_of(loader), loader.prefetch_factor * loader.num_workers))  # prefetch
        return self._parts(iter(()))

    def _rounds(self, batches: Iterator[Any]) -> Iterator[tuple[Any]]:
        while taken := list(islice(batches, self._num_batches)):
            if not (self._drop_last and len(taken) < self._num_batches):
                yield (nested.concatenate(taken),)

    def _parts(self, rounds: Iterator[tuple[Any]]) -> Iterator[tuple[Any, GlobalBatch]]:
        """Yield this rank's part of each round; `rounds` is empty except on rank 0."""
        full = (getattr(_batches_of(self), "batch_size", None) or 0) * self._num_batches
        first = None
        while sent := self._broadcast(next(rounds, ())):
            [batch] = sent
            if first is None:
                first = nested.slice_tensors(batch, slice(self._size))
            samples = nested.find_batch_size(batch)
            each, rest = divmod(samples, self._size)
            if rest and not self._drop_last:
                batch, each = nested.concatenate([batch, first]), each + 1
            mine = slice(self._rank * each, (self._rank + 1) * each)
            padded = each * self._size
            known = GlobalBatch(min(samples, padded), padded, full)
            yield nested.slice_tensors(batch, mine), known

    def _broadcast(self, sent: tuple[Any, ...]) -> tuple[Any, ...]:
        with named_call(LOOP):
            return tuple(broadcast_object_list([nested.send_to_device(sent, "cpu")])[0])

    def _last(self, batch: GlobalBatch) -> GlobalBatch:
        self.remainder = batch.samples
        return batch

    def _position(self) -> dict[str, Any]:
        return super()._position() if self._rank == 0 else {}


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
    *,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
) -> DataLoaderShard:
    """Return a loader that yields one rank's shard of a DataLoader's batches.

    Args:
        device: Device to move batches to if `put_on_device` is set.
        num_processes, process_index: Default to the world size and rank of the process group.
        split_batches, even_batches: See `BatchSamplerShard`.
        rng_types: See `DataLoaderShard`.
        dispatch_batches: See `DataLoaderDispatcher`; requires `put_on_device`. None enables it for
            iterable datasets if `put_on_device` is set.
        use_seedable_sampler, data_seed, non_blocking: See `DataLoaderConfiguration`.
        use_stateful_dataloader: See `DataLoaderShard`.

    Raises:
        UsageError: A batch cannot be split into equal parts, `dispatch_batches` is set without
            `put_on_device`, or torchdata is missing.
    """
    if dispatch_batches and not put_on_device:
        raise UsageError(
            "dispatch_batches=True needs put_on_device=True",
            where="the script's prepare_data_loader(...)",
            fix="add put_on_device=True, or remove dispatch_batches",
            code=Code.CONTRADICTION,
        )
    options, source = _options_of(dataloader)
    if use_seedable_sampler:
        options[source] = _with_seedable_sampler(options[source], data_seed)
    options |= {
        "device": device if put_on_device else None,
        "use_stateful_dataloader": use_stateful_dataloader,
        "_drop_last": dataloader.drop_last,
        "_non_blocking": non_blocking,
    }
    own_rank, size = rank_and_size()
    num_ranks = size if num_processes is None else num_processes
    rank = own_rank if process_index is None else process_index
    batch_size = dataloader.batch_size or getattr(options[source], "batch_size", None)
    if split_batches and batch_size != 1:
        require_multiple(batch_size, num_ranks)
    if device is not None and not kind_of(device.type).can_pin:
        options["pin_memory"] = False
    if dispatch_batches or (dispatch_batches is None and put_on_device and source == "dataset"):
        return DataLoaderDispatcher(split_batches=split_batches, **options | {"generator": None})
    generator = None
    if num_ranks > 1:
        if source == "dataset" or not use_seedable_sampler:
            generator = _generator_of(options[source])
        options |= _share_of(options, source, num_ranks, rank, split_batches, even_batches)
    return DataLoaderShard(rng_types=rng_types, synchronized_generator=generator, **options)


def _share_of(
    options: dict[str, Any], source: str, num_ranks: int, rank: int, split: bool, even: bool
) -> dict[str, Any]:
    """Return the DataLoader arguments for one rank's shard."""
    given = options[source]
    if source != "dataset":
        if source == "sampler" and not isinstance(given, BatchSampler):
            raise UsageError(
                "a loader with batch_size=None yields single samples, which cannot be sharded",
                where="the script's data loader",
                fix="pass a batch_size, or a BatchSampler as sampler",
                code=Code.BATCH_SIZE,
            )
        return {source: BatchSamplerShard(given, num_ranks, rank, split, even)}
    is_theirs = nested.is_instance_of(given, "datasets", "IterableDataset")  # may be sharded
    if is_theirs and given.n_shards >= num_ranks and not split:
        return {source: given.shard(num_shards=num_ranks, index=rank)}
    size, drop_last = options["batch_size"], options["drop_last"]
    shard = IterableDatasetShard(given, size or 1, drop_last, num_ranks, rank, split)
    return {source: shard, "batch_size": size // num_ranks if size and split else size}


def _with_seedable_sampler(batches: Any, seed: int | None) -> Any:
    """Return a copy of a random batch sampler, seeded by rank 0; return others unchanged."""
    drawn = getattr(batches, "sampler", None)
    if not isinstance(drawn, RandomSampler):
        return batches
    [agreed] = broadcast_object_list([torch.random.initial_seed() if seed is None else seed])
    options = drawn.data_source, drawn.replacement, drawn._num_samples, drawn.generator
    other = copy.copy(batches)
    other.sampler = SeedableRandomSampler(*options, data_seed=agreed)
    return other


def _generator_of(source: Any) -> Any:
    """Return the generator of a stream or sampler; create one if a sampler's is None."""
    drawn: Any = source if isinstance(source, IterableDataset) else getattr(source, "sampler", None)
    if hasattr(drawn, "generator") and drawn.generator is None and drawn is not source:
        drawn.generator = torch.Generator(device=torch.get_default_device())
        drawn.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    return getattr(drawn, "generator", None)


def get_sampler(dataloader: Any) -> Any:
    """Return the sampler that draws a loader's samples, or None if there is none."""
    return getattr(_batches_of(dataloader), "sampler", None)


def _batches_of(loader: Any) -> Any:
    return loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler


def _options_of(loader: DataLoader[Any]) -> tuple[dict[str, Any], str]:
    """Return a DataLoader's arguments, and the name of the argument to shard or skip."""
    options = {name: getattr(loader, name) for name in _COPIED}
    if isinstance(loader.dataset, IterableDataset):
        return options | {"batch_size": loader.batch_size, "drop_last": loader.drop_last}, "dataset"
    if loader.batch_sampler is None:
        return options | {"sampler": loader.sampler, "batch_size": None}, "sampler"
    return options | {"batch_sampler": loader.batch_sampler}, "batch_sampler"


def _stateful_class() -> Any:
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        raise UsageError(
            "use_stateful_dataloader=True needs torchdata, which is not installed",
            where="the script's DataLoaderConfiguration(...)",
            fix="`pip install torchdata`, or remove use_stateful_dataloader",
            code=Code.NOT_INSTALLED,
        ) from None
    return StatefulDataLoader
