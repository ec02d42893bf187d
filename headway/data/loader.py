"""The prepared data loader, which yields this rank's part of each global batch and can resume."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import IterableDataset

from headway.data.active_loader import LOOP, LoaderLoop, TrainingLoader
from headway.data.batch_sources import Division, NoBatch, batch_source_for, samples_in
from headway.data.configuration import (
    DataLoaderConfiguration,
    check_configuration,
    check_shardable,
    with_batches_of_ranks,
)
from headway.data.generators import Generators, SampleSeeds, mixed
from headway.data.loader_set import (
    TWO_ITERATORS,
    Epochs,
    LoaderIteration,
    LoaderSet,
    StartPosition,
)
from headway.data.order import Draws, SampleOrder
from headway.data.script_loaders import (
    AttributeProxy,
    LoaderWithoutFirst,
    SkipBatchSampler,
    batch_size_of,
    changed,
    is_of_datasets,
    is_plain,
    len_of,
    samplers_of,
    source_of,
    split_by_rank,
)
from headway.data.workers import ShieldedWorker, starting_workers, with_shielded_workers
from headway.devices.table import kind_of
from headway.distributed.call_barrier import named_call
from headway.distributed.collectives import broadcast_object_list
from headway.distributed.handler import check_range, checked
from headway.distributed.nested import checksum_of, is_on, send_to_device
from headway.distributed.rng import RNGType, synchronize_rng_states
from headway.errors import CheckpointError, Code, UsageError
from headway.ipc.progress import process_progress
from headway.ipc.step_clock import DATA, SCRIPT


class PreparedDataLoader(AttributeProxy, TrainingLoader):
    """The script's loader, sharded across the ranks.

    Rank r of w gets batches r, r + w, ...; with `split_batches`, it gets 1/w of each batch. All
    ranks get the same number of batches of the same size: if the last global batch is not full, it
    is split evenly, and up to w - 1 of its samples are repeated; `gather_for_metrics` drops the
    repeated samples. The mean of the ranks' mean losses is therefore the mean over the samples.
    With `drop_last`, such a batch is dropped instead, for models that cannot use small batches.
    With `even_batches=False`, no samples are repeated, and only the first ranks get the remaining
    batches. The batches of a batch sampler without `batch_size` keep their sizes.

    Shuffling (torch's `RandomSampler`) draws the same permutation on all ranks as in a single
    process with the same seed. Other samplers with a `generator` attribute draw from generators in
    the same state on all ranks; samplers without one must draw the same order from their own seed.
    A stream (`IterableDataset`) is split by its shards if possible; otherwise, every rank reads the
    entire stream. In the first iteration, the ranks check that their data are the same, unless the
    data are `already_sharded`. Streams, and loaders that override `__iter__`, are read one batch
    ahead to detect the last batch, so one more batch has been read after a `break`.

    With `dispatch_batches`, and for a loader that overrides `__iter__`, only rank 0 reads the data,
    and it sends each rank its batches. Batches of an overridden `__iter__` keep their sizes. If
    fewer batches than ranks remain, the other ranks get a copy of a batch from the same round.

    Each iteration calls `set_epoch()` on the sampler, batch sampler and dataset, where present.
    Epochs are counted from 0, or from the last number passed to `set_epoch()` of the prepared
    loader.

    All other attributes (`dataset`, `batch_size`, `sampler`, ...) are read from the script's
    loader, and cannot be set on the prepared loader.

    Attributes:
        end_of_dataloader: whether the latest iteration has reached its last batch.
    """

    end_of_dataloader = False
    _skipped = 0  # batches of this rank that `without_first` skips

    def __init__(
        self,
        loader: Any,
        rank: int = 0,
        num_ranks: int = 1,
        *,
        config: DataLoaderConfiguration | None = None,
        micro_batch: int | None = None,
        device: torch.device | None = None,
        rng_types: Sequence[RNGType] = (),
        seed: int | None = None,
        run: LoaderSet | None = None,
        number: int = 0,
    ) -> None:
        # no super().__init__: attributes come from `loader`, and batches from `_batch_source`
        config = config or DataLoaderConfiguration()
        if device is not None and not kind_of(device.type).can_pin:
            loader.pin_memory = False
        check_shardable(loader, config, num_ranks)
        loader = with_batches_of_ranks(loader, micro_batch, config, num_ranks)
        whole, loader = loader, split_by_rank(loader, rank, num_ranks, config.split_streams)
        self._proxied, self._data = loader, getattr(loader, "dataset", None)
        self._is_plain = is_plain(loader)  # torch draws a seed for workers and pipes
        is_presharded = num_ranks > 1 and (config.already_sharded or loader is not whole)
        is_sent = config.dispatch_batches or not self._is_plain
        reads_all = num_ranks > 1 and not is_presharded and bool(is_sent)
        self._division = Division(num_ranks, rank, config.even_batches, reads_all, is_presharded)
        self.data_shards = num_ranks if is_presharded else None  # None: all ranks read all data
        self._config, self._rng_types = config, rng_types
        self.run = run or LoaderSet(process_progress())
        self._is_map = self._is_plain and not isinstance(self._data, IterableDataset)
        self._seed = seed
        self._seeds = None if seed is None else SampleSeeds(seed, rank if is_presharded else 0)
        self._sources = [loader, *samplers_of(loader), self._data]
        self._own = Generators(self._sources, only_torch=False)
        del self._own.all[:3]  # the global generators
        self.draws: Any = self._draws(seed, number)  # a SampleOrder for a map-style dataset
        num_batches = 1 if is_presharded else num_ranks  # of the script's loader per global batch
        self.epochs = Epochs(self.run, self.draws, num_batches, batch_size_of(loader))
        self._set_epochs = [
            _wrap_set_epoch(source, self.epochs)
            for source in self._sources[1:]
            if callable(getattr(source, "set_epoch", None))
        ]
        if self._is_plain and not loader.in_order:
            self.run.report(_IN_ORDER)
            loader = changed(loader, in_order=True)
        self._read = with_shielded_workers(loader, records_draws=self._is_map and seed is None)
        if self._seeds is not None and self._is_plain:
            self._read = self._seeds.seed_loader(self._read)
        self._batch_source = batch_source_for(self._read, self.draws, self._division)
        is_stream = self._is_plain and not self._is_map
        if is_stream and self._batch_source.reads and not loader.num_workers:
            has_state = hasattr(self._data, "state_dict") and hasattr(self._data, "load_state_dict")
            self.epochs.stream = self._data if has_state else None
        is_cpu = device is not None and device.type == "cpu"
        has_others = torch.accelerator.current_accelerator(check_available=False) is not None
        self._moves_to = None if is_cpu and not has_others else device
        pinned = config.non_blocking or getattr(loader, "pin_memory", False)
        self._overlaps = bool(pinned and device is not None and kind_of(device.type).copies_ahead)

    def _draws(self, seed: int | None, number: int) -> Draws:
        """Return the loader's `Draws`; a seed is combined with the loader's number."""
        loader, config, division = self._proxied, self._config, self._division
        if config.use_seedable_sampler and self._is_map:
            seed = config.data_seed
            if seed is None:  # every rank prepares the loader
                [seed] = broadcast_object_list([torch.random.initial_seed()])
        seed = seed if seed is None else mixed(seed, number)
        is_alike = division.num_ranks > 1 and not (division.reads_all or division.is_presharded)
        if not self._is_map:
            return Draws([loader] if self._is_plain else [], is_alike, only_torch=False, seed=seed)
        return SampleOrder(loader, is_alike, seed, self._seeds)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        caller = sys._getframe(1)
        return self._batches(f"{caller.f_code.co_filename}:{caller.f_lineno}")

    def _batches(self, line: str) -> Iterator[Any]:
        """Yield the batches of an iteration, which starts when the first batch is requested."""
        with named_call(LOOP):
            synchronize_rng_states(self._rng_types)
        epochs, run, state = self.epochs, self.run, vars(self)
        if epochs.skip_empty():
            return
        num_ranks, progress = self._division.num_ranks, run.progress
        device = self._moves_to
        current, loop, requests = self._begin(line), LoaderLoop(self), run.checkpoint.requests
        try:
            requests[epochs] = current
            state["end_of_dataloader"] = False
            with starting_workers(self._proxied):
                items = self._batch_source.begin(current)
            if progress.is_watched:
                progress.clock.enter(DATA)
                workers = getattr(self, "num_workers", None)  # not every loader is a DataLoader
                progress.clock.num_workers = workers if isinstance(workers, int) else None
            for batch, global_batch in items:
                if progress.is_watched:
                    known = global_batch.samples // num_ranks
                    progress.begin_forward(known or samples_in(batch))
                current.rounds += 1
                current.samples += global_batch.samples
                current.seen = progress.num_trained
                if global_batch.is_last:
                    state["end_of_dataloader"] = current.is_complete = True
                if batch is not NoBatch:
                    loop.begin_batch(global_batch)
                    if device is not None and not is_on(batch, device):
                        batch = send_to_device(batch, device, non_blocking=self._overlaps)
                    yield batch
                    if run.checkpoint.action is not None:
                        run.checkpoint.on_request(current)
                    if run.saved_after is not None:
                        run.check_save()
                    if current.depth and progress.feature_use.resuming and current.takes_turns:
                        run.report(TWO_ITERATORS)
                    requests[epochs] = current
                if progress.is_watched:
                    progress.clock.enter(DATA)
            current.is_exhausted = True
        finally:
            if progress.is_watched:
                progress.clock.enter(SCRIPT)
            run.end(current)
            loop.end()
            if current.outer_stream is not None and not current.has_trained:
                self._return_stream(current.outer_stream)
        if current.rounds or self._skipped:
            return
        if current.start.taken:
            epochs.next_start = current.next_epoch  # the epoch had no batches left
            yield from self._batches(line)
        else:
            self._report_dropped()

    # ------------------------------------------------------------------ starting an iteration

    def _begin(self, line: str) -> LoaderIteration:
        """Start the next iteration, and call `set_epoch()` on the sources that have it."""
        current = self.run.begin(self.epochs, self._skipped * self.epochs.per_round, line)
        start, stream = current.start, self.epochs.stream
        if stream is not None and current.depth:
            current.outer_stream = copy.deepcopy(stream.state_dict())
        if not start.taken:  # the stream's state is that of the previous epoch
            self._load_stream(current)
        self._call_set_epoch(start.epoch)
        if start.taken:
            self._load_stream(current)
        if stream is not None:
            if self._division.is_presharded and not start.taken:
                current.first = copy.deepcopy(stream.state_dict())
        elif not self._is_map:
            self._own.restore(current.first or ())
            current.first = self._own.states()
            if current.depth and current.first:  # an open iteration draws from them, too
                self.run.report(_STREAM_NOTE)
        if current.is_new and not self._is_map:
            self.draws.begin_first(self.draws.generators.states())
        if self._seeds is not None:
            self._seeds.begin_epoch(start.epoch, start.taken - current.reread)
        if self._is_plain and not current.is_new:
            number = mixed(self.draws.seed or 0, start.epoch, self._division.rank + 2)
            vars(self._batch_source.loader)["generator"] = torch.Generator().manual_seed(number)
        return current

    def _load_stream(self, current: LoaderIteration) -> None:
        if current.start.stream is not None and self.epochs.stream is not None:
            self.epochs.stream.load_state_dict(copy.deepcopy(current.start.stream))

    def _return_stream(self, state: Any) -> None:
        """Restore the stream's state for the enclosing loop, after a nested one."""
        self.epochs.stream.load_state_dict(state)
        if checksum_of(self.epochs.stream.state_dict()) != checksum_of(state):
            self.run.report(_NESTED_STREAM)

    def _report_dropped(self) -> None:
        """Log that `drop_last` drops all batches, although a single process would have some."""
        drops = any(getattr(source, "drop_last", False) for source in self._sources)
        length, num_ranks = len_of(self._data), self._division.num_ranks
        total = self.total_batch_size
        if drops and num_ranks > 1 and total and length != 0:
            own = "" if length is None or self.data_shards else f"{length} "
            self.run.report(_DROPPED.format(own, total, total // num_ranks, num_ranks))

    # ------------------------------------------------------------------ position

    @property
    def total_batch_size(self) -> int:
        """The number of samples in a full global batch; 0 if unknown."""
        return self.epochs.batch_size * self._division.num_ranks

    @property
    def epoch(self) -> int:
        """The number of the current epoch; once that epoch is complete, the number of the next."""
        return self.epochs.position.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position in the data.

        `Accelerator.save_state` and `Accelerator.checkpoint` save the position. Call this method
        only in scripts that write their own checkpoints.

        Examples:
            >>> from headway import Accelerator
            >>> from torch.utils.data import DataLoader
            >>> loader = Accelerator(cpu=True).prepare(DataLoader(range(4), batch_size=2))
            >>> for batch in loader:
            ...     state = loader.state_dict()
            ...     break
            >>> loader.load_state_dict(state)
            >>> [batch.tolist() for batch in loader]
            [[2, 3]]
        """
        saved = self.epochs.state_dict()
        init = getattr(self._read, "worker_init_fn", None)
        is_persistent = getattr(self._proxied, "persistent_workers", False)
        is_within = is_persistent or StartPosition(*saved["place"]).taken  # workers would continue
        if is_within and isinstance(init, ShieldedWorker) and init.has_drawn:
            self.run.report(_DRAWN_IN_WORKERS)
        is_in_workers = is_persistent and hasattr(self._data, "set_epoch")
        if is_in_workers and not is_of_datasets(self._data):
            self.run.report(_EPOCH_OF_WORKERS)
        return saved | {
            "order": self.draws.seed,
            "generators": self._own.states(),
            "seed": self._seed,
            "size": self.epochs.batch_size,
            "total": self.total_batch_size,
            "together": self.epochs.num_batches,
            "ranks": self.data_shards,
            "length": len_of(self._data),
        }

    def require_position(self, position: dict[str, Any], where: str) -> bool:
        """Check that data and batches match `position`; return whether it is within an epoch."""
        start = StartPosition(*position["place"])
        if not start.taken:
            return False
        same = "prepare the same loader"
        facts: list[tuple[str, Any, Any, str]] = [
            ("seed", position["seed"], self._seed, f"pass Accelerator(seed={position['seed']})"),
            ("number of ranks", position["ranks"], self.data_shards, "use the same number"),
        ]
        if start.stream is None:
            facts.append(("number of samples", position["length"], len_of(self._data), same))
            is_same = not self._is_map and 0 < self.total_batch_size == position["total"]
            if not (is_same or (self.draws.counts_samples and position["size"])):
                facts.append(("batch size", position["size"], self.epochs.batch_size, same))
                if not self._is_map and start.taken % self.epochs.per_round:
                    what = "number of batches that the ranks read together"
                    divisor = f"a divisor of {start.taken // self.epochs.unit}"
                    facts.append((what, divisor, self.epochs.num_batches, same))
        for fact, saved, live, fix in facts:
            if saved != live:
                raise CheckpointError(
                    f"cannot resume a loader within an epoch: its {fact} is {live} in this"
                    f" run and {saved} in the checkpoint",
                    where=where,
                    fix=f"{fix}, or load a checkpoint from the end of an epoch",
                    code=Code.MISMATCH,
                )
        return True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume the next iteration from the position at which `state_dict()` was called.

        Raises:
            CheckpointError: the data or batches differ from those of the saved loader.
        """
        self.require_position(state_dict, "the script's load_state_dict(...)")
        self.seek(state_dict)

    def seek(self, position: dict[str, Any]) -> None:
        """Start the next iteration at a position that `require_position` has accepted."""
        start = StartPosition(*position["place"])
        if self._drops_rest(start):
            start = StartPosition(start.epoch + 1, depth=start.depth)
        if self.epochs.stream is None:
            start = start._replace(stream=None)
        self.epochs.resume(start, position)
        if position["order"] is not None:
            self.draws.seed = position["order"]
        self._own.restore(position["generators"])
        if start.before is not None and not start.taken and self._batch_source.reads:
            # a custom sampler may count its epochs
            batches, checksum, first = start.before
            end = StartPosition(start.epoch - 1, batches * self.epochs.unit, checksum, first)
            self._call_set_epoch(end.epoch)
            self.draws.draw(LoaderIteration(self.epochs, end))
        is_read_again = not self._is_map and start.taken and start.stream is None
        if is_read_again and position["together"] != self.epochs.num_batches:
            self.run.report(_STREAM_NOTE)
            self.epochs.next_start = start._replace(checksum=0)

    def _drops_rest(self, start: StartPosition) -> bool:
        """Return whether the rest of the epoch is dropped because it is smaller than a batch."""
        draws, taken = self.draws, start.taken
        if not (draws.counts_samples and taken and draws.source.drop_last):
            return False
        return len(draws.source.sampler) - taken < self.total_batch_size

    def follow(self, run: LoaderSet) -> None:
        """Attach this loader to another Accelerator's training run."""
        self.run = self.epochs.run = run

    # ------------------------------------------------------------------ variants

    @contextmanager
    def override_even_batches(self, even_batches: bool) -> Iterator[None]:
        """Override `DataLoaderConfiguration.even_batches` inside a `with` block."""
        check_configuration(replace(self._config, even_batches=even_batches))
        source, division = self._batch_source, self._division._replace(even=even_batches)
        self._batch_source = batch_source_for(self._read, self.draws, division)
        try:
            yield
        finally:
            self._batch_source = source

    def without_first(self, batches: int) -> PreparedDataLoader:
        """Return a view of this loader for `skip_first_batches`."""
        other = copy.copy(self)
        other._skipped = self._skipped + batches
        return other

    @property
    def remainder(self) -> int:
        """The number of samples in the last global batch; 0 if it is full, -1 if unknown."""
        length, drops_last = len_of(self._data), getattr(self._proxied, "drop_last", False)
        if length is None or drops_last or not self.total_batch_size:
            return -1
        return length % self.total_batch_size

    def __len__(self) -> int:
        return max(0, len(self._batch_source) - self._skipped)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch number for the next iteration, the samplers and the dataset."""
        self.epochs.set(epoch)
        self._call_set_epoch(epoch)

    def _call_set_epoch(self, epoch: int) -> None:
        for set_epoch in self._set_epochs:
            set_epoch(epoch)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and hasattr(self._proxied, name):
            raise UsageError(
                f"{name} of a prepared DataLoader cannot be changed",
                where=f"the script's assignment to .{name}",
                fix=f"set {name} before prepare(), or prepare a new DataLoader",
                code=Code.CHANGED_LATE,
            )
        super().__setattr__(name, value)


class _EpochSetter:
    """Wraps a `set_epoch` of the script so that it also sets the epoch of prepared loaders."""

    def __init__(self, owner: Any) -> None:
        self.owner, self.set_epoch = owner, owner.set_epoch
        self.loaders = WeakSet[Epochs]()

    def __call__(self, epoch: int) -> None:
        self.set_epoch(epoch)
        for loader in self.loaders:
            loader.set(epoch)

    def __reduce__(self) -> tuple[Any, ...]:  # loader workers and copies use the original
        return getattr, (self.owner, "set_epoch")


def _wrap_set_epoch(source: Any, epochs: Epochs) -> Any:
    """Wrap `source.set_epoch` so that it also sets the loader's epoch; return the original."""
    noted = source.set_epoch
    if not isinstance(noted, _EpochSetter):
        if not hasattr(source, "__dict__"):
            return noted
        noted = vars(source)["set_epoch"] = _EpochSetter(source)
    noted.loaders.add(epochs)
    return noted.set_epoch


_STREAM_NOTE = (
    "note: the batches before the checkpoint are read again and dropped, because the stream has no"
    " state_dict() or runs in workers; the run resumes exactly only if the same samples are read"
)
_IN_ORDER = (
    "note: in_order=False of a DataLoader has no effect: a prepared loader yields its batches in"
    " order, so that ranks get different samples and a run resumes exactly"
)
_NESTED_STREAM = (
    "note: a loop over a stream with state_dict() was interrupted by another loop over the same"
    " stream, and load_state_dict() did not restore its state, so the run does not resume exactly."
    " Prepare a second stream for the inner loop"
)
_DRAWN_IN_WORKERS = (
    "note: loader workers draw random numbers, which do not resume exactly in the middle of an"
    " epoch or with persistent workers: pass Accelerator(seed=...), or use num_workers=0"
)
_EPOCH_OF_WORKERS = (
    "note: set_epoch() of a dataset does not reach persistent workers, unless it writes to shared"
    " memory. They keep the epoch in which they were started, and a resumed run starts them in a"
    " later epoch, so it does not resume exactly. Pass persistent_workers=False"
)
_DROPPED = (
    "note: a prepared loader yielded no batches: its {}samples are fewer than a global batch of {}"
    " ({} for each of {} ranks), which drop_last=True requires. Use a smaller batch_size, fewer"
    " ranks, or drop_last=False"
)


@checked
def skip_first_batches(dataloader: Iterable[Any], num_batches: int = 0) -> Any:
    """Return a loader that skips the first batches of each epoch.

    Skipped samples of a map-style dataset are drawn but not loaded; those of a stream are loaded.
    Iterating over the returned loader counts as an epoch of `dataloader`.

    Args:
        dataloader: a prepared loader, or any other iterable of batches.
        num_batches: number of batches to skip on this rank.

    Raises:
        UsageError: `num_batches` is not a non-negative integer.

    Examples:
        >>> from headway import skip_first_batches
        >>> from torch.utils.data import DataLoader
        >>> [batch.tolist() for batch in skip_first_batches(DataLoader(range(6), batch_size=2), 2)]
        [[4, 5]]
    """
    check_range("skip_first_batches", 0, num_batches=num_batches)
    if isinstance(dataloader, TrainingLoader):
        return dataloader.without_first(num_batches)
    loader: Any = dataloader
    if is_plain(loader) and not isinstance(loader.dataset, IterableDataset):
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        return changed(loader, **{name: SkipBatchSampler(source_of(loader), num_batches)})
    return LoaderWithoutFirst(loader, num_batches)
