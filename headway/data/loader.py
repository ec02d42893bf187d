"""The prepared data loader: yields this rank's share of every global batch, and can resume."""

from __future__ import annotations

import copy
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from typing import Any
from weakref import WeakSet
from zlib import crc32

import torch
from torch.utils.data import DataLoader, IterableDataset

from headway.data.active_loader import LoaderLoop, TrainingLoader
from headway.data.configuration import (
    DataLoaderConfiguration,
    check_configuration,
    check_shardable,
    with_batches_of_ranks,
)
from headway.data.division import Division, Offset, samples_in
from headway.data.epochs import Epochs, Pass
from headway.data.generators import Generators, mixed
from headway.data.order import Agree, Draws, Place, SampleOrder
from headway.data.passes import LoaderSet
from headway.data.script_loaders import (
    SkipBatchSampler,
    StandIn,
    batch_size_of,
    changed,
    is_of_datasets,
    is_plain,
    len_of,
    source_of,
    split_by_rank,
)
from headway.data.seeds import SampleSeeds
from headway.data.shares import Item, NoBatch, mark, share_of
from headway.data.workers import ShieldedWorker, starting_workers, with_shielded_workers
from headway.devices.table import kind_of
from headway.distributed.collectives import broadcast_object_list
from headway.distributed.handler import check_range, checked
from headway.distributed.meeting import named
from headway.distributed.nested import is_on, send_to_device
from headway.errors import CheckpointError, UsageError
from headway.ipc.progress import process_progress
from headway.ipc.step_clock import DATA, SCRIPT


class PreparedDataLoader(StandIn, TrainingLoader):
    """The script's loader, sharded across the ranks.

    Rank r of w gets batches r, r + w, ...; with `split_batches` they have a w-th of the samples.
    All ranks get equally many batches of equally many samples: if the last global batch is not
    full, it is split evenly, and up to w - 1 of its samples are repeated; `gather_for_metrics`
    drops these repeats. So the mean over ranks of mean losses is the mean over the samples.
    `drop_last` drops that batch instead, for models that cannot use small batches. With
    `even_batches=False` no samples are repeated: the remaining batches go to the first ranks.
    The batches of a batch sampler without `batch_size` keep their sizes.

    Shuffling (torch's `RandomSampler`) draws the same permutation on all ranks, and the same as a
    single process with the same seed. Other samplers with a `generator` attribute draw from equal
    generators on all ranks; samplers without it must draw the same order by their own seed. A
    stream (`IterableDataset`) is split by its shards if possible, otherwise every rank reads all of
    it. In the first pass the ranks check that their data are the same, unless they are
    `already_sharded`. Streams and loaders with workers are read one batch ahead, so that the last
    batch is known: after a `break`, one more batch has been read.

    With `dispatch_batches`, and for a loader that overrides `__iter__`, only rank 0 reads, and
    it sends each rank its batches. Batches of an overridden `__iter__` keep their sizes: if the
    last batches are fewer than the ranks, the other ranks get a batch of the same round again.

    Each pass calls `set_epoch()` of the sampler, batch sampler and dataset, if present. Epochs
    count from 0, or from the last `set_epoch()` of the prepared loader.

    All other attributes (`dataset`, `batch_size`, `sampler`, ...) are those of the script's loader,
    and cannot be set on the prepared loader.

    Attributes:
        end_of_dataloader: whether the latest pass has reached its last batch.
    """

    end_of_dataloader: bool
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
        before_pass: Callable[[], None] | None = None,
        seed: int | None = None,
        run: LoaderSet | None = None,
        number: int = 0,
    ) -> None:
        # no super().__init__: the attributes are those of `loader`, the batches those of `_share`
        config = config or DataLoaderConfiguration()
        if device is not None and not kind_of(device.type).can_pin:
            loader.pin_memory = False
        check_shardable(loader, config, num_ranks)
        loader = with_batches_of_ranks(loader, micro_batch, config, num_ranks)
        whole, loader = loader, split_by_rank(loader, rank, num_ranks, config.split_streams)
        self._inside, self._data = loader, getattr(loader, "dataset", None)
        self._is_plain = is_plain(loader)  # torch draws a seed for workers and pipes
        is_own = num_ranks > 1 and (config.already_sharded or loader is not whole)
        is_sent = config.dispatch_batches or not self._is_plain
        reads_all = num_ranks > 1 and not is_own and bool(is_sent)
        self._division = Division(num_ranks, rank, config.even_batches, reads_all, is_own)
        self.num_shares = num_ranks if is_own else None  # if each rank reads its own data
        self._config, self._before_pass = config, before_pass
        self.run = run or LoaderSet(process_progress())
        self._is_map = self._is_plain and not isinstance(self._data, IterableDataset)
        self._seeds = None if seed is None else SampleSeeds(seed, rank if is_own else 0)
        self._sources = _sources_of(loader)
        self._own = Generators(self._sources, only_torch=False)
        del self._own.all[:3]  # the global generators
        self.draws: Any = self._draws(seed, number)  # a SampleOrder for a map-style dataset
        num_batches = 1 if is_own else num_ranks  # of the script's loader per global batch
        self.epochs = Epochs(self.run, self.draws, num_batches, batch_size_of(loader))
        self._set_epochs = [
            _noted_epoch(source, self.epochs)
            for source in self._sources[1:]
            if callable(getattr(source, "set_epoch", None))
        ]
        self._read = with_shielded_workers(loader, notes_draws=self._is_map and seed is None)
        if self._seeds is not None and self._is_plain:
            self._read = self._seeds.seed_loader(self._read)
        self._share = share_of(self._read, self.draws, self._division)
        if self._is_plain and not self._is_map and self._share.reads and not loader.num_workers:
            has_state = hasattr(self._data, "state_dict") and hasattr(self._data, "load_state_dict")
            self.epochs.stream = self._data if has_state else None
        is_cpu = device is not None and device.type == "cpu"
        has_others = torch.accelerator.current_accelerator(check_available=False) is not None
        self._moves_to = None if is_cpu and not has_others else device
        pinned = config.non_blocking or getattr(loader, "pin_memory", False)
        self._overlaps = bool(pinned and device is not None and kind_of(device.type).copies_ahead)
        vars(self)["end_of_dataloader"] = False

    def _draws(self, seed: int | None, number: int) -> Draws:
        """Return the loader's random draws, seeded by `seed` and the loader's number if given."""
        loader, config, division = self._inside, self._config, self._division
        if config.use_seedable_sampler and self._is_map:
            seed = config.data_seed
            if seed is None:  # every rank prepares the loader
                [seed] = broadcast_object_list([torch.random.initial_seed()])
        seed = seed if seed is None else mixed(seed, number)
        is_alike = division.num_ranks > 1 and not (division.reads_all or division.is_own)
        agree: Agree = _of_rank_0 if is_alike else list
        if not self._is_map:
            return Draws([loader] if self._is_plain else [], agree, only_torch=False, seed=seed)
        return SampleOrder(loader, agree, seed, self._seeds)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        caller = sys._getframe(1)
        return self._batches(f"{caller.f_code.co_filename}:{caller.f_lineno}")

    def _batches(self, line: str) -> Iterator[Any]:
        """Yield the batches of a pass, which begins when the first batch is requested."""
        if self._before_pass is not None:
            with named("a loop over a prepared DataLoader"):
                self._before_pass()
        epochs, run, state, stream = self.epochs, self.run, vars(self), self.epochs.stream
        if epochs.skip_empty():
            return
        num_ranks, progress = self._division.num_ranks, run.progress
        is_summed = not self._is_map and stream is None
        device = self._moves_to
        current, loop, asked = self._begin_pass(line), LoaderLoop(self), run.checkpoint.asked
        try:
            asked[epochs] = current
            state["end_of_dataloader"] = False
            items, lookahead = self._begin_reading(current)
            if progress.is_watched:
                progress.clock.enter(DATA)
                workers = getattr(self, "num_workers", None)  # not every loader is a DataLoader
                progress.clock.num_workers = workers if isinstance(workers, int) else None
            following = next(items, None)
            while following is not None:
                batch, global_batch = following
                if lookahead is not None:
                    has_more = lookahead.has_more
                else:
                    if progress.is_watched:
                        progress.clock.enter(DATA)
                    if stream is not None:
                        current.stream = copy.deepcopy(stream.state_dict())
                    following = next(items, None)  # one batch ahead
                    has_more = following is not None
                if progress.is_watched:
                    known = global_batch.samples // num_ranks
                    progress.begin_forward(known or samples_in(batch))
                if is_summed:
                    current.checksum = crc32(b"%d" % mark(batch), current.checksum)
                current.rounds += 1
                current.samples += global_batch.samples
                current.seen = progress.num_trained
                if not has_more:
                    state["end_of_dataloader"] = current.is_complete = True
                if batch is not NoBatch:
                    loop.begin_batch(global_batch, is_last=not has_more)
                    if device is not None and not is_on(batch, device):
                        batch = send_to_device(batch, device, non_blocking=self._overlaps)
                    yield batch
                    if run.checkpoint.action is not None:
                        run.checkpoint.ask(current)
                    asked[epochs] = current
                if lookahead is not None:
                    if progress.is_watched:
                        progress.clock.enter(DATA)
                    following = next(items, None)
            current.is_exhausted = True
        finally:
            if progress.is_watched:
                progress.clock.enter(SCRIPT)
            run.end(current)
            loop.end()
        if current.place.taken.batches and not current.rounds and not self._skipped:
            epochs.place = current.following  # the epoch had no batches left
            yield from self._batches(line)

    # ------------------------------------------------------------------ starting a pass

    def _begin_pass(self, line: str) -> Pass:
        """Begin the next pass, and call `set_epoch()` where present."""
        skipped = self.epochs.offset_after(self._skipped) if self._skipped else None
        current = self.run.begin(self.epochs, skipped, line)
        place = current.place
        if not any(place.taken):  # the stream's state is that of the previous epoch
            self._load_stream(current)
        self._call_set_epoch(place.epoch)
        if any(place.taken):
            self._load_stream(current)
        if not self._is_map and self.epochs.stream is None:
            current.generators = self._own.states()
            if current.depth and current.generators:  # an open pass draws from them, too
                self.run.report(_STREAM_NOTE)
        if place.is_new and not self._is_map:
            self.draws.begin_first(self.draws.generators.states())
        if self._seeds is not None:
            self._seeds.begin_pass(place.epoch, 0 if current.reread.batches else max(place.taken))
        if self._is_plain and not place.is_new:
            number = mixed(self.draws.seed or 0, place.epoch, self._division.rank + 2)
            vars(self._share.loader)["generator"] = torch.Generator().manual_seed(number)
        return current

    def _load_stream(self, current: Pass) -> None:
        if current.place.stream is not None and self.epochs.stream is not None:
            self.epochs.stream.load_state_dict(copy.deepcopy(current.place.stream))

    def _begin_reading(self, current: Pass) -> tuple[Iterator[Item], Any]:
        """Return the items of a pass, and an object with `has_more`, or None."""
        place, share = current.place, self._share
        with starting_workers(self._inside):
            items = share.begin(current)
        if place.checksum:
            items, taken = chain([*islice(items, 1)], items), place.taken.batches  # read again
            if self._is_map:
                current.checksum = current.sums[taken - 1] if len(current.sums) >= taken else 0
            if current.checksum != place.checksum and share.reads:
                self.run.report(_OTHER_ORDER.format(taken))
        return items, share.ahead

    # ------------------------------------------------------------------ position

    @property
    def total_batch_size(self) -> int:
        """The number of samples in a full global batch; 0 if unknown."""
        return self.epochs.batch_size * self._division.num_ranks

    @property
    def epoch(self) -> int:
        """The number of the current epoch, or of the next if that is complete."""
        return self.epochs.number

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position in the data.

        `Accelerator.save_state` and `checkpoint` include it; call this only in scripts that write
        their own checkpoints.

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
        stands, current = self.epochs.resume_place(), self.epochs.current
        at_begin = None if current is None or current.is_complete else current.generators
        init = getattr(self._read, "worker_init_fn", None)
        lasts = getattr(self._inside, "persistent_workers", False)
        is_within = lasts or _place(stands).taken.batches  # where workers would have continued
        if is_within and isinstance(init, ShieldedWorker) and init.has_drawn:
            self.run.report(_DRAWN_IN_WORKERS)
        if lasts and hasattr(self._data, "set_epoch") and not is_of_datasets(self._data):
            self.run.report(_EPOCH_OF_WORKERS)
        return stands | {
            "order": self.draws.seed,
            "generators": at_begin or self._own.states(),
            "seed": None if self._seeds is None else self._seeds.seed,
            "size": self.epochs.batch_size,
            "total": self.total_batch_size,
            "together": self.epochs.num_batches,
            "ranks": self.num_shares,
            "length": len_of(self._data),
        }

    def require_position(self, position: dict[str, Any], where: str) -> bool:
        """Check that data and batches match `position`; return whether it is within an epoch."""
        place, seed = _place(position), None if self._seeds is None else self._seeds.seed
        if not place.taken.batches:
            return False
        together, same = self.epochs.num_batches, "prepare the same loader"
        facts: list[tuple[str, Any, Any, str]] = [
            ("seed", position["seed"], seed, f"pass Accelerator(seed={position['seed']})"),
            ("number of ranks", position["ranks"], self.num_shares, "use as many ranks"),
        ]
        if place.stream is None:
            facts.append(("number of samples", position["length"], len_of(self._data), same))
            is_same = not self._is_map and 0 < self.total_batch_size == position["total"]
            if not (is_same or self.draws.counts_samples):
                facts.append(("batch size", position["size"], self.epochs.batch_size, same))
                if not self._is_map and place.taken.batches % together:
                    what = "number of batches that the ranks read together"
                    facts.append((what, f"{place.taken.batches} were read", together, same))
        for fact, saved, live, fix in facts:
            if saved != live:
                raise CheckpointError(
                    f"cannot resume a loader within an epoch: its {fact} is {live} in this"
                    f" run and {saved} in the checkpoint",
                    where=where,
                    fix=f"{fix}, or load a checkpoint from the end of an epoch",
                )
        return True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume in the next pass from the position at which `state_dict()` was called.

        Raises:
            CheckpointError: this loader's data or batches differ.
        """
        self.require_position(state_dict, "the script's load_state_dict(...)")
        self.seek(state_dict)

    def seek(self, position: dict[str, Any]) -> None:
        """Begin the next pass at a position that `require_position` has accepted."""
        place = _place(position)
        if self._has_no_rest(place):
            place = Place(place.epoch + 1, depth=place.depth)
        samples = place.taken.samples
        if samples and not self._is_map:  # another number of ranks makes other batches
            place = place._replace(taken=Offset(samples // self.epochs.batch_size, samples))
        if self.epochs.stream is None:
            place = place._replace(stream=None)
        self.epochs.resume(place, position)
        if position["order"] is not None:
            self.draws.seed = position["order"]
        self._own.restore(position["generators"])
        if place.before is not None and not place.taken.batches and self._share.reads:
            self._draw_again(place.epoch - 1, *place.before)
        is_read_again = not self._is_map and place.taken.batches and place.stream is None
        if is_read_again and position["together"] != self.epochs.num_batches:
            self.run.report(_STREAM_NOTE)
            self.epochs.place = place._replace(checksum=0)

    def _draw_again(self, epoch: int, batches: int, checksum: int, first: Any) -> None:
        """Draw an epoch from a custom sampler again, because it may count its epochs."""
        self._call_set_epoch(epoch)
        sums = array("L")
        for _ in islice(self.draws.draw(Place(epoch, first=first), sums), batches):
            pass
        if not sums or sums[-1] != checksum:
            self.run.report(_OTHER_ORDER.format(batches))

    def _has_no_rest(self, place: Place) -> bool:
        """Return whether the rest of the epoch is dropped because it is less than a batch."""
        draws, taken = self.draws, place.taken.samples
        if not (draws.counts_samples and taken and draws.source.drop_last):
            return False
        return len(draws.source.sampler) - taken < self.total_batch_size

    def follow(self, run: LoaderSet) -> None:
        """Move this loader to the training of another Accelerator."""
        self.run = self.epochs.run = run

    # ------------------------------------------------------------------ variants

    @contextmanager
    def sharing_evenly(self, even_batches: bool) -> Iterator[None]:
        """Set `DataLoaderConfiguration.even_batches` temporarily."""
        check_configuration(replace(self._config, even_batches=even_batches))
        share, division = self._share, self._division._replace(even=even_batches)
        self._share = share_of(self._read, self.draws, division)
        try:
            yield
        finally:
            self._share = share

    def without_first(self, batches: int) -> PreparedDataLoader:
        """Return a view of this loader for `skip_first_batches`."""
        other = copy.copy(self)
        other._skipped = self._skipped + batches
        return other

    @property
    def remainder(self) -> int:
        """The number of samples in the last global batch, or 0 if it is full; -1 if unknown."""
        length, drops_last = len_of(self._data), getattr(self._inside, "drop_last", False)
        if length is None or drops_last or not self.total_batch_size:
            return -1
        return length % self.total_batch_size

    def __len__(self) -> int:
        return max(0, len(self._share) - self._skipped)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch number of the next pass, also in the samplers and the dataset."""
        self.epochs.set(epoch)
        self._call_set_epoch(epoch)

    def _call_set_epoch(self, epoch: int) -> None:
        for set_epoch in self._set_epochs:
            set_epoch(epoch)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and hasattr(self._inside, name):
            raise UsageError(
                f"{name} of a prepared DataLoader cannot be changed",
                where=f"the script's assignment to .{name}",
                fix=f"set {name} before prepare(), or prepare a new DataLoader",
            )
        super().__setattr__(name, value)


def _sources_of(loader: Any) -> list[Any]:
    """Return a loader, its samplers and its dataset, without duplicates."""
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    samplers += [getattr(sampler, "sampler", None) for sampler in samplers]
    found = [loader, *samplers, getattr(loader, "dataset", None)]
    return [*{id(source): source for source in found if source is not None}.values()]


class _NotedEpoch:
    """Wrapper of a `set_epoch` in the script that also sets the epoch of prepared loaders."""

    def __init__(self, owner: Any) -> None:
        self.owner, self.set_epoch = owner, owner.set_epoch
        self.loaders = WeakSet[Epochs]()

    def __call__(self, epoch: int) -> None:
        self.set_epoch(epoch)
        for loader in self.loaders:
            loader.set(epoch)

    def __reduce__(self) -> tuple[Any, ...]:  # loader workers and copies use the original
        return getattr, (self.owner, "set_epoch")


def _noted_epoch(source: Any, epochs: Epochs) -> Any:
    """Wrap `source.set_epoch` so that it also sets the loader's epoch; return the original."""
    noted = source.set_epoch
    if not isinstance(noted, _NotedEpoch):
        if not hasattr(source, "__dict__"):
            return noted
        noted = vars(source)["set_epoch"] = _NotedEpoch(source)
    noted.loaders.add(epochs)
    return noted.set_epoch


def _of_rank_0(states: list[Any]) -> list[Any]:
    with named("a loop over a prepared DataLoader"):
        agreed: list[Any] = broadcast_object_list([*states])
    return agreed


def _place(position: dict[str, Any]) -> Place:
    place = Place(*position["place"])
    return place._replace(taken=Offset(*place.taken))


_STREAM_NOTE = (
    "note: the batches before the checkpoint are read again and dropped, because the stream has no"
    " state_dict() or runs in workers; this resumes exactly only if it yields the same samples"
)
_DRAWN_IN_WORKERS = (
    "note: loader workers draw random numbers, which do not resume exactly in the middle of an"
    " epoch or with persistent workers: pass Accelerator(seed=...), or use num_workers=0"
)
_EPOCH_OF_WORKERS = (
    "note: set_epoch() of a dataset does not reach persistent workers: they keep the epoch in"
    " which they were started, and a resumed run starts them in a later epoch, which is not exact."
    " Pass persistent_workers=False"
)
_OTHER_ORDER = (
    "note: the first {} batches of a loader differ from those before the checkpoint, so the epoch"
    " does not resume exactly: its sampler or stream has its own state. Draw from Python's,"
    " numpy's or torch's generators, use set_epoch(), or implement state_dict() for the stream"
)


@checked
def skip_first_batches(dataloader: Iterable[Any], num_batches: int = 0) -> Any:
    """Return a loader that skips the first batches of each epoch.

    Skipped samples of a map-style dataset are drawn but not loaded; those of a stream are read.
    An epoch over the returned loader counts as an epoch over `dataloader`.

    Args:
        dataloader: a prepared loader, or any other iterable of batches.
        num_batches: number of batches to skip on this rank.

    Raises:
        UsageError: `num_batches` is not an integer of at least 0.

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
    return _WithoutFirst(loader, num_batches)


class _WithoutFirst(StandIn, DataLoader[Any]):
    """Wrapper of a loader that drops its first batches."""

    _num_batches: int

    def __init__(self, loader: Any, num_batches: int) -> None:
        # no super().__init__: the attributes are those of `loader`
        vars(self)["_inside"], vars(self)["_num_batches"] = loader, num_batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return islice(self._inside, self._num_batches, None)

    def __len__(self) -> int:
        return max(0, len(self._inside) - self._num_batches)
