"""A prepared data loader: this rank's share of every global batch, and where its passes stand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from headway.contract.notes import say
from headway.contract.progress import DATA, FORWARD, SCRIPT, Progress, process_progress
from headway.data.active_loader import GlobalBatch, LoaderLoop
from headway.data.configuration import DataLoaderConfiguration
from headway.data.dispatch import share_of
from headway.data.position import (
    FRESH,
    Offset,
    Pass,
    Passes,
    ResumePoint,
    Resumption,
    SavedRng,
    Start,
    counts_samples,
    generators_of,
    samples_in,
    set_generators_ahead,
    set_generators_to_begin,
)
from headway.data.samplers import (
    SeedableRandomSampler,
    draws_all_at_first,
    with_seedable_sampler,
)
from headway.data.seeds import SampleSeeds, give_generators
from headway.data.sharding import (
    NoBatch,
    Unpack,
    batch_size_of,
    is_plain,
    is_stateful,
    source_of,
    without_first,
)
from headway.data.workers import starting_workers
from headway.devices.table import kind_of
from headway.distributed.meeting import named
from headway.distributed.nested import is_on, send_to_device
from headway.distributed.rng import generator_states
from headway.errors import CheckpointError, UsageError


def copied_ahead(
    items: Iterator[Any], unpack: Unpack, device: torch.device
) -> tuple[Iterator[Any], Unpack]:  # pragma: needs a GPU
    """Return `items` and `unpack` with batches that are copied on a stream of their own.

    A copy starts when its item is taken, and the current stream waits for it when the item is
    unpacked. It overlaps where the batch is in pinned memory; its memory may then be used anew for
    a later copy, as that one waits for all work which was queued before it.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copies() -> Iterator[tuple[Any, GlobalBatch]]:
        for item in items:
            batch, global_batch = unpack(item)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                batch = send_to_device(batch, device, non_blocking=True)
            yield batch, global_batch

    def wait_for(item: tuple[Any, GlobalBatch]) -> tuple[Any, GlobalBatch]:
        torch.cuda.current_stream(device).wait_stream(stream)
        return item

    return copies(), wait_for


Loader = TypeVar("Loader", bound="PreparedDataLoader")


class PreparedDataLoader(DataLoader[Any]):
    """The script's loader, of which each rank reads its own share.

    Rank r of w gets batches r, r + w, ... (with `split_batches`: the r-th part of every batch). All
    ranks get equally many batches of equally many samples: the last global batch, if it is
    not full, is shared out evenly, and up to w - 1 samples from the epoch's beginning are repeated.
    So the mean over ranks of mean losses is the mean over the samples. `gather_for_metrics` leaves
    the repeated samples out again. `drop_last` drops that batch instead, for models that cannot use
    a small share of it, such as a BatchNorm that gets a single sample. With `even_batches=False`
    nothing is repeated: the last global batch gives each rank a batch while there are some.

    The batches of a batch sampler without `batch_size` keep the sizes that it gave them.

    Shuffling (torch's `RandomSampler`) draws the same permutation on all ranks, and the same as one
    process would with the same seed. Another sampler that has a `generator` attribute draws from an
    equal one on all ranks; one that has none must agree by its own seed. A stream
    (`IterableDataset`) is read in full by every rank, and must be the same on all of them.

    With `dispatch_batches`, and for a loader with an `__iter__` of its own, rank 0 alone reads, and
    sends each rank its share. The batches of such an `__iter__` keep their sizes: where the last
    ones are fewer than the ranks, other ranks get one from the beginning again.

    Each pass calls `set_epoch()` of the sampler, batch sampler and data set, where they have one.
    It counts from 0, or from the loader's own last `set_epoch()`.

    All other attributes (`dataset`, `batch_size`, `sampler`, ...) are those of the script's loader,
    and cannot be set here.

    Attributes:
        end_of_dataloader: whether the latest pass has come to its last batch.
    """

    end_of_dataloader: bool
    _skipped = 0  # batches of this rank that `without_first` leaves out
    _has_workers = False  # that outlive a pass, in this run

    def __init__(
        self,
        loader: Any,
        rank: int = 0,
        num_ranks: int = 1,
        *,
        config: DataLoaderConfiguration | None = None,
        device: torch.device | None = None,
        before_pass: Callable[[], None] | None = None,
        seed: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        # no super().__init__: the attributes are those of `loader`, the batches those of `_share`
        config = config or DataLoaderConfiguration()
        if device is not None and not kind_of(device.type).can_pin:
            loader.pin_memory = False
        if config.use_seedable_sampler and isinstance(loader, DataLoader):
            loader = with_seedable_sampler(loader, config.data_seed)
        pinned = config.non_blocking or getattr(loader, "pin_memory", False)
        self._original = loader
        self._of_rank = (rank, num_ranks, config)
        self._seeds = seeds = None if seed is None else SampleSeeds(seed)
        if seeds is not None:
            give_generators(self._samplers())
        self._share = share_of(loader, rank, num_ranks, config, seeds=seeds)
        self._device = device
        copies_ahead = device is not None and kind_of(device.type).copies_ahead
        self._copies_to = device if pinned and copies_ahead else None
        self._before_pass = before_pass
        self._progress = progress or process_progress()
        self._passes = Passes(self._progress)
        dataset = getattr(loader, "dataset", None)
        has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        is_stream = isinstance(dataset, IterableDataset) and is_plain(loader)
        self._stream: Any = None  # what has a state of its own in a pass
        if is_stateful(loader) and self._share.reads:
            self._stream = loader
        elif is_stream and has_state and loader.num_workers == 0:
            self._stream = dataset
        self._is_map = is_plain(loader) and not is_stream
        self._workers_last = self._share.reads and getattr(loader, "persistent_workers", False)
        self._loads_here = (self._is_map or self._stream is not None) and not loader.num_workers
        vars(self)["end_of_dataloader"] = False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._before_pass is not None:
            with named("a loop over a prepared DataLoader"):
                self._before_pass()
        share, stream, num_ranks = self._share, self._stream, self._of_rank[1]
        start, current = self._begin_pass()
        loop, state, progress = LoaderLoop(self), vars(self), self._progress
        device = self._device if _can_be_elsewhere(self._device) else None
        overlaps = device is not None and kind_of(device.type).copies_ahead
        state["end_of_dataloader"] = False
        try:
            with starting_workers(self._original):
                items, unpack = share.begin(start)
            lookahead = share.lookahead
            if self._copies_to:  # pragma: needs a GPU
                items, unpack = copied_ahead(items, unpack, self._copies_to)
                lookahead = None
            start.begun()
            draws_ahead = self._draws_ahead
            if progress.is_watched:
                progress.enter(DATA)
                workers = getattr(self, "num_workers", None)  # not every loader is one of torch's
                progress.clock.num_workers = workers if isinstance(workers, int) else None
            following = next(items, _END)
            if lookahead is None:
                start.loaded()
            while following is not _END:
                batch, global_batch = unpack(following)
                if lookahead is not None:
                    has_more = lookahead.has_more
                else:
                    if progress.is_watched:
                        progress.enter(DATA)
                    if stream is not None:
                        current.stream = stream.state_dict()
                    if draws_ahead:
                        current.ahead = generator_states(_CPU)
                    following = next(items, _END)  # one batch ahead
                    has_more = following is not _END
                if progress.is_watched:
                    progress.enter(FORWARD)
                    known = global_batch.samples // num_ranks
                    progress.clock.batch_samples = known or samples_in(batch)
                current.rounds += 1
                current.samples += global_batch.samples
                if not has_more:
                    state["end_of_dataloader"] = current.is_complete = True
                if batch is not NoBatch:
                    loop.begin_batch(global_batch, is_last=not has_more)
                    if device is not None and not is_on(batch, device):
                        batch = send_to_device(batch, device, non_blocking=overlaps)
                    yield batch
                if lookahead is not None:
                    if progress.is_watched:
                        progress.enter(DATA)
                    following = next(items, _END)
            current.is_exhausted = True
        finally:
            if progress.is_watched:
                progress.enter(SCRIPT)
            self._passes.end(current, self._given(current))
            loop.end()

    # ------------------------------------------------------------------ where its passes stand

    @property
    def total_batch_size(self) -> int:
        """The number of samples in a full batch of all ranks together; 0 if that is not known."""
        _, num_ranks, config = self._of_rank
        return batch_size_of(self._original) * (1 if config.split_batches else num_ranks)

    @property
    def epoch(self) -> int:
        """The number of the epoch that has begun and is not complete, or else of the next one.

        Once something was trained, a pass in which nothing is counts as none.
        """
        passes, current = self._passes, self._passes.current
        if current is None:
            return passes.epochs
        is_epoch = current.has_trained or not passes.has_trained
        return passes.epochs + (is_epoch and current.is_complete)

    @property
    def samples(self) -> int:
        """How many samples all ranks together have been given in these epochs, in earlier runs too.

        Batches whose sizes nobody knows in advance count as none.
        """
        current = self._passes.current
        return self._passes.samples + (0 if current is None else current.samples)

    @property
    def has_trained(self) -> bool:
        """Whether something was trained in a pass, in earlier runs as well."""
        return self._passes.has_trained

    @property
    def is_evaluated(self) -> bool:
        """Whether a pass has begun and is not complete, and none has trained, as in evaluations."""
        current = self._passes.current
        return current is not None and not current.is_complete and not self.has_trained

    def position(self) -> dict[str, Any]:
        """Return where the passes stand, for a checkpoint: values, and tensors of generators."""
        passes, current = self._passes, self._passes.current
        position: dict[str, Any] = {
            "following": self._next_number,
            "epochs": self.epoch,
            "size": batch_size_of(self._original),
            "total": self.total_batch_size,
            "seed": None if self._seeds is None else self._seeds.seed,
            "generators": [one.get_state() for one in generators_of(self._sources())],
            "pass": None,
            "samples": self.samples,
            "has_trained": self.has_trained,
            "has_lasting_workers": passes.has_lasting_workers,
            "is_looked_at": passes.is_looked_at,
            "keeps_looks": passes.keeps_looks,
            "left": passes.left and [[*passes.left.after], passes.left.times],
            "is_at_end": current is not None and current.is_complete,
            "order_seeds": [one.initial_seed for one in self._seedable()],
        }
        if current is not None and not current.is_complete:
            taken = [*self._given(current)]
            position["pass"] = {**current.state_dict(), "taken": taken, "length": self._length()}
        return position

    @property
    def _next_number(self) -> int:
        return self._passes.following

    def require_position(self, position: dict[str, Any], where: str) -> None:
        """Require that this loader can go on where another was: with the same data and batches."""
        if position["pass"] is None:
            return
        for fact, saved, live, fix in self._facts_to_keep(position):
            if saved != live:
                raise CheckpointError(
                    f"a loader cannot go on in the middle of an epoch: its {fact} is {live} in this"
                    f" run, and {saved} in the checkpoint",
                    where=where,
                    fix=f"{fix}, or load a checkpoint from the end of an epoch",
                )

    def _facts_to_keep(self, position: dict[str, Any]) -> Iterator[tuple[str, Any, Any, str]]:
        """Yield what a pass needs to go on: its name, as it was saved, as it is, and the fix."""
        state, seed = position["pass"], position["seed"]
        live_seed = None if self._seeds is None else self._seeds.seed
        yield "seed", seed, live_seed, f"pass Accelerator(seed={seed})"
        if state["stream"] is not None:
            return
        same = "prepare the same loader"
        yield "number of samples", state["length"], self._length(), same
        if not self._is_map or not counts_samples(source_of(self._original)):
            yield "batch size", position["size"], batch_size_of(self._original), same
        per_round, read = max(self._taken(1).batches, 1), state["taken"][0]
        if not self._is_map and read % per_round:
            together = "number of batches that the ranks read together"
            yield together, f"{read} were read", per_round, same

    def seek(
        self,
        position: dict[str, Any],
        resumption: Resumption,
        *,
        only_skipped: bool = False,
    ) -> None:
        """Let the next pass go on at a position that `require_position` has accepted.

        With `only_skipped` only if that pass is one over `without_first(...)`.
        """
        resumption.seek(partial(self._go_to, position, only_skipped))
        state, reads_again = position["pass"], not (self._is_map or only_skipped)
        if state is not None and state["stream"] is None and reads_again and not self._of_rank[0]:
            say(_STREAM_NOTE)

    def _go_to(self, position: dict[str, Any], only_skipped: bool, resumption: Resumption) -> None:
        for generator, own in zip(
            generators_of(self._sources()), position["generators"], strict=False
        ):
            generator.set_state(own)
        for sampler, seed in zip(self._seedable(), position["order_seeds"], strict=False):
            sampler.initial_seed = seed
        state = position["pass"]
        pending = None if state is None else ResumePoint(state, only_skipped)
        self._passes.resume(position, pending, resumption)

    def over_where_left(
        self, position: dict[str, Any], ended: Sequence[tuple[PreparedDataLoader, dict[str, Any]]]
    ) -> tuple[dict[str, Any], str]:
        """Let a pass be over that was saved where the script has left those before it.

        In the last iteration of a loop that ends before its loader does (`break`, `zip` with a
        shorter one), nothing but the passes before shows that no batch follows: two that were left
        there, or one if another loader is at its end. What was left once, to look at a batch, say,
        goes on.

        `ended` are the loaders that were at their ends, with their positions. Return the position
        to go on from, and what there is to tell.
        """
        state, (after, times) = position["pass"], position.get("left") or (None, 0)
        if state is None or not self._is_map:
            return position, ""
        taken = state["taken"]
        if taken == after and times >= (1 if ended else 2):
            following = max(position["following"], state["epoch"] + 1)
            epochs = position.get("epochs", state["epoch"]) + 1
            over = {**position, "following": following, "epochs": epochs, "pass": None}
            return over, _LEFT_NOTE.format(taken[0])
        may_be_zipped = state["epoch"] == 0 and any(
            other._is_map
            and at_end["following"] == 1
            and self._taken(len(other)).batches == taken[0]
            for other, at_end in ended
        )
        return position, _ZIP_NOTE if may_be_zipped else ""

    def state_dict(self) -> dict[str, Any]:
        """Return where the passes stand; each rank keeps its own.

        `Accelerator.save_state` and `checkpoint` save it with the rest: this is for scripts that
        write checkpoints themselves.

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
        return self.position()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass go on where `state_dict()` was called, in this run or another.

        Raises:
            CheckpointError: this loader's data or batches are others.
        """
        self.require_position(state_dict, "the script's load_state_dict(...)")
        self.seek(state_dict, Resumption(None, self._device or torch.device("cpu"), self._progress))

    def _length(self) -> int | None:
        try:
            return len(self._original.dataset)
        except (AttributeError, TypeError, NotImplementedError):
            return None

    def _sources(self) -> list[Any]:
        """Return the loader, its samplers and its data set, each once."""
        dataset = getattr(self._original, "dataset", None)
        return _each_once([self._original, *self._samplers(), dataset])

    def _samplers(self) -> list[Any]:
        """Return what draws samples and batches, each once."""
        samplers = [getattr(self._original, one, None) for one in ("sampler", "batch_sampler")]
        return _each_once(samplers + [getattr(one, "sampler", None) for one in samplers])

    def _seedable(self) -> list[SeedableRandomSampler]:
        return [one for one in self._samplers() if isinstance(one, SeedableRandomSampler)]

    def _given(self, current: Pass) -> Offset:
        """Return what a pass has given, with what was left out of it."""
        since = self._taken(current.rounds)
        return Offset(*(one + other for one, other in zip(current.before, since, strict=True)))

    def _taken(self, rounds: int) -> Offset:
        _, num_ranks, config = self._of_rank
        batches = rounds * (1 if config.split_batches else num_ranks)
        return Offset(batches, batches * batch_size_of(self._original))

    # ------------------------------------------------------------------ how a pass begins

    @contextmanager
    def sharing_evenly(self, even_batches: bool) -> Iterator[None]:
        """Share out evenly in the block, or not; see `DataLoaderConfiguration.even_batches`."""
        rank, num_ranks, config = self._of_rank
        share = self._share
        config = replace(config, even_batches=even_batches)
        self._share = share_of(self._original, rank, num_ranks, config, self._skipped, self._seeds)
        try:
            yield
        finally:
            self._share = share

    def _begin_pass(self) -> tuple[Start, Pass]:
        """Return how the next pass begins, and that pass."""
        passes, owners = self._passes, self._sources()
        passes.go_back()
        pending, passes.pending = passes.pending, None
        interrupted, passes.interrupted = passes.interrupted, None
        goes_on = pending is not None and bool(self._skipped or not pending.only_skipped)
        if interrupted is not None and not goes_on:
            interrupted.generators.begin_other_pass()
        before, first_item = self._taken(self._skipped), 0
        redraws = self._start_lasting_workers(is_fresh=not goes_on)
        start = FRESH if redraws is None or self._is_map else Start(begun=redraws)
        if pending is not None and interrupted is not None and goes_on:
            state = pending.state
            taken = Offset(*state["taken"])
            is_there = not self._skipped or before == taken  # where the stream's state is
            before = before if self._skipped else taken
            put_back = self._to_put_back(interrupted.generators)
            start = Start(before, ready=put_back, loaded=put_back)
            if state["stream"] is not None and self._stream is not None and is_there:
                self._stream.load_state_dict(state["stream"])
                first_item = before.samples or before.batches
                start = start._replace(taken=Offset(), begun=partial(set_generators_ahead, state))
            elif state.get("is_drawn"):
                redraws = partial(set_generators_to_begin, state, owners)
                if self._draws_ahead:
                    start = start._replace(ready=partial(set_generators_ahead, state))
            else:
                set_generators_to_begin(state, owners)
        number = passes.following if pending is None else pending.state["epoch"]
        drawn_by = self._samplers() if self._is_map else None
        is_rest = pending is not None
        current = Pass(number, owners, before, drawn_by, interrupted, is_rest=is_rest)
        passes.begin(current)

        def drawing() -> None:
            if redraws is not None:
                redraws()
            current.drawing()

        self._tell_epoch(number)
        if self._seeds is not None:
            self._seeds.begin_pass(number, self._samplers(), first_item)
        passes.following = max(passes.following, number + 1)
        return start._replace(drawing=drawing), current

    def _start_lasting_workers(self, *, is_fresh: bool) -> Callable[[], None] | None:
        """Let workers that outlive a pass be started in the next one, if they are not there.

        torch draws a seed when it starts them. Here it is drawn in the pass in which a run without
        a cut would have drawn it. A fresh pass does not go on, and so leaves the generators as it
        draws.

        Return what takes the seed back, if workers are started that had been there before.
        """
        if self._skipped or not self._workers_last:
            return None
        are_there, self._has_workers = self._has_workers, True
        were_there, self._passes.has_lasting_workers = self._passes.has_lasting_workers, True
        if not is_fresh or are_there == were_there:
            return None
        generator = self._original.generator or torch.default_generator
        if are_there:
            torch.empty((), dtype=torch.int64).random_(generator=generator)
            return None
        before = generator.get_state()

        def take_back() -> None:
            generator.set_state(before)

        return take_back

    def _to_put_back(self, generators: SavedRng) -> Callable[[], None]:
        """Return what puts the generators back that a pass uses to draw again what it has given.

        A sampler with a generator of its own that draws while the pass goes on draws on from there.
        """
        generators.begin_pass()
        lazy: list[Any] = self._sources()[1:]
        if self._is_map and draws_all_at_first(source_of(self._original)):
            lazy = []
        drawn_on = generators_of(lazy)
        own = [
            (one, one.get_state()) for one in generators_of(self._sources()) if one not in drawn_on
        ]

        def put_back() -> None:
            generators.restore()
            for generator, state in own:
                generator.set_state(state)

        return put_back

    @property
    def _draws_ahead(self) -> bool:
        """Whether this process loads a batch, perhaps at random, before the one before is given."""
        is_ahead = self._copies_to is not None or self._share.lookahead is None
        return is_ahead and self._loads_here and self._seeds is None

    def without_first(self, batches: int) -> PreparedDataLoader:
        """Return this loader without the first batches of each pass; see `skip_first_batches`."""
        share = share_of(self._original, *self._of_rank, skip=batches, seeds=self._seeds)
        return self._with_share(share, batches)

    def _with_share(self: Loader, share: Any, skipped: int) -> Loader:
        """Return this loader with other batches of the same passes."""
        other = copy.copy(self)
        other._share, other._skipped = share, skipped
        return other

    @property
    def total_dataset_length(self) -> int:
        """The number of samples in the data set; TypeError if it has no length."""
        return len(self._original.dataset)

    @property
    def remainder(self) -> int:
        """The number of samples in the last global batch if it is not full, or 0; -1 if unknown."""
        if not self.total_batch_size or getattr(self._original, "drop_last", False):
            return -1
        try:
            return self.total_dataset_length % self.total_batch_size
        except (AttributeError, TypeError):
            return -1

    def __len__(self) -> int:
        return len(self._share)

    def set_epoch(self, epoch: int) -> None:
        """Number the next pass `epoch`, for all that draw or order samples."""
        passes = self._passes
        passes.following = epoch
        passes.count_from(epoch, passes.samples)
        if passes.pending is not None and passes.pending.state["epoch"] != epoch:
            passes.pending = None  # the script begins another one
        self._tell_epoch(epoch)

    def _tell_epoch(self, epoch: int) -> None:
        for source in self._sources()[1:]:
            set_epoch = getattr(source, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        if "_original" not in self.__dict__:  # copy and pickle ask before there are attributes
            raise AttributeError(name)
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and hasattr(self._original, name):
            raise UsageError(
                f"{name} of a prepared DataLoader cannot be changed",
                where=f"the script's assignment to .{name}",
                fix=f"set {name} before prepare(), or prepare a new DataLoader",
            )
        super().__setattr__(name, value)


def _can_be_elsewhere(device: torch.device | None) -> bool:
    """Return whether a batch may be on another device: not on a CPU where torch knows no other."""
    is_cpu = device is not None and device.type == "cpu"
    return not is_cpu or torch.accelerator.current_accelerator(check_available=False) is not None


_CPU = torch.device("cpu")
_END = object()


def _each_once(objects: list[Any]) -> list[Any]:
    return list({id(one): one for one in objects if one is not None}.values())


_LEFT_NOTE = (
    "note: saved after batch {} of a loader, where the script has left its passes before: the next"
    " pass is a new one"
)
_ZIP_NOTE = (
    "note: saved in the last batch of a loader's first pass, in the middle of another's, which goes"
    " on from there; if the script reads the two with zip, save after that loop instead"
)
_STREAM_NOTE = (
    "note: the data set is a stream without state_dict(), or is read by workers, so the batches"
    " before the checkpoint are read and dropped; the others are the same only if it gives the same"
    " samples again"
)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader that leaves out the first batches of each pass.

    The samples of a map data set that are left out are not loaded, only drawn; those of a stream
    are read. A pass over it counts as one of the given loader, whose next pass has the next epoch.

    Args:
        dataloader: a prepared loader, or any other.
        num_batches: batches of this rank to leave out.

    Raises:
        UsageError: `num_batches` is not a whole number of at least 0.

    Examples:
        >>> from headway import skip_first_batches
        >>> from torch.utils.data import DataLoader
        >>> [batch.tolist() for batch in skip_first_batches(DataLoader(range(6), batch_size=2), 2)]
        [[4, 5]]
    """
    if not isinstance(num_batches, int) or isinstance(num_batches, bool) or num_batches < 0:
        raise UsageError(
            f"num_batches is {num_batches!r}, not a whole number of at least 0",
            where="the script's skip_first_batches(...)",
            fix="pass how many batches of the epoch each rank has trained on",
        )
    if isinstance(dataloader, PreparedDataLoader):
        return dataloader.without_first(num_batches)
    if is_plain(dataloader) and not isinstance(dataloader.dataset, IterableDataset):
        return without_first(dataloader, num_batches)
    return _WithoutFirst(dataloader, num_batches)


class _WithoutFirst(DataLoader[Any]):
    """Another loader, read from its beginning."""

    _loader: Any
    _num_batches: int

    def __init__(self, loader: Any, num_batches: int) -> None:
        # no super().__init__: the attributes are those of `loader`
        vars(self)["_loader"], vars(self)["_num_batches"] = loader, num_batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return islice(self._loader, self._num_batches, None)

    def __len__(self) -> int:
        return max(0, len(self._loader) - self._num_batches)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # copy and pickle ask before there are attributes
            raise AttributeError(name)
        return getattr(self._loader, name)
