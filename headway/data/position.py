"""Where a pass over a prepared loader stands, and how another run goes on there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain, cycle, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler

from headway.contract.progress import Progress
from headway.data.active_loader import GlobalBatch
from headway.distributed.nested import leaves
from headway.distributed.rng import generator_states, set_generator_states


class Round(NamedTuple):
    """The samples of one global batch (or their indices), and where each rank's are in it.

    Ranks without a part of it have no slice: they are the last ones.
    """

    samples: list[Any]
    slices: tuple[slice, ...]
    batch: GlobalBatch


class Division(NamedTuple):
    """How rounds are divided among the ranks; see `DataLoaderConfiguration`."""

    num_ranks: int
    split: bool = False
    even: bool = True

    @property
    def num_batches(self) -> int:
        """The number of the script's batches that make a whole round."""
        return 1 if self.split else self.num_ranks

    def num_rounds(self, items: int, per_round: int, rank: int, drop_last: bool) -> int:
        """Return of how many rounds `rank` has a part, where `items` make up all of them."""
        whole, rest = divmod(items, per_round)
        if drop_last or not rest:
            return whole
        first = 0 if self.even else rank * -(-per_round // self.num_ranks)
        return whole + (first < rest)

    def of_batches(self, batches: Sequence[list[Any]], spare: list[Any], size: int) -> Round:
        """Divide a round of batches, of `size` samples if full; 0: they have sizes of their own.

        `spare` are samples to repeat where ranks must have equally many.
        """
        samples = list(chain.from_iterable(batches))
        have_own_sizes = not size and len(batches) == self.num_batches
        if not self.split and (have_own_sizes or not self.even):
            return Round(samples, *_whole(tuple(map(len, batches)), self.num_ranks, size))
        return self.of_samples(samples, spare, size * self.num_batches)

    def of_samples(self, samples: list[Any], spare: list[Any], full: int) -> Round:
        """Divide a round of samples, of which there are usually `full`."""
        if self.even:
            slices, batch = _evenly(len(samples), self.num_ranks, full)
        else:
            slices, batch = _unevenly(len(samples), self.num_ranks, full)
        if batch.padded > batch.samples:
            samples = samples + list(islice(cycle(spare), batch.padded - batch.samples))
        return Round(samples, slices, batch)


@lru_cache(maxsize=64)  # nearly all rounds have one size
def _evenly(samples: int, num_ranks: int, full: int) -> tuple[tuple[slice, ...], GlobalBatch]:
    size = -(-samples // num_ranks)
    return _slices((size,) * num_ranks), GlobalBatch(samples, size * num_ranks, full)


@lru_cache(maxsize=64)
def _unevenly(samples: int, num_ranks: int, full: int) -> tuple[tuple[slice, ...], GlobalBatch]:
    """Give each rank as many as in a full round, while there are some."""
    size = -(-full // num_ranks)
    sizes = tuple(min(size, samples - start) for start in range(0, samples, size))
    return _whole(sizes, num_ranks, size)


@lru_cache(maxsize=64)
def _whole(
    sizes: tuple[int, ...], num_ranks: int, size: int
) -> tuple[tuple[slice, ...], GlobalBatch]:
    """Give each rank a batch of these, which are usually of `size`."""
    is_even = len(sizes) == num_ranks and len(set(sizes)) == 1
    batch = GlobalBatch(sum(sizes), sum(sizes), size * len(sizes), () if is_even else sizes)
    return _slices(sizes), batch


def of_ready_batches(sizes: tuple[int, ...], num_new: int) -> GlobalBatch:
    """Return what a round of ready batches of these sizes is, the first `num_new` not repeated."""
    return GlobalBatch(sum(sizes[:num_new]), sum(sizes), shares=sizes)


def _slices(sizes: tuple[int, ...]) -> tuple[slice, ...]:
    ends = tuple(accumulate(sizes))
    return tuple(slice(end - size, end) for size, end in zip(sizes, ends, strict=True))


def samples_in(batch: Any) -> int:
    """Return the length of the first tensor in `batch` that has one above 0; else 0."""
    if type(batch) in (tuple, list) and batch:  # nearly all are: asked in every step
        first = batch[0]
        if type(first) is torch.Tensor and (shape := first.shape) and (length := shape[0]):
            return length
    tensors = (leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim)
    return next((len(tensor) for tensor in tensors if len(tensor)), 0)


_CPU = torch.device("cpu")


class Offset(NamedTuple):
    """What a pass has given to all ranks together, in units of the script's loader."""

    batches: int = 0
    samples: int = 0  # 0 if the batches have sizes of their own


def _nothing() -> None:
    """Do nothing."""


class Start(NamedTuple):
    """How a pass begins: what it leaves out, and what is called at which moment.

    `taken` is left out of a pass that another run has begun, with the batches that the script
    itself leaves out; the samples of a map data set are drawn anew, not loaded. None: what every
    pass leaves out.
    """

    taken: Offset | None = None
    begun: Callable[[], None] = _nothing  # torch's iterator is made, and has drawn a workers' seed
    drawing: Callable[[], None] = _nothing  # the first index is about to be drawn
    ready: Callable[[], None] = _nothing  # what is left out is drawn, no sample after it is loaded
    loaded: Callable[[], None] = _nothing  # the first batch is there, where it is loaded ahead


FRESH = Start()


class SavedRng:
    """The global generators of a rank that goes on, which the passes that go on leave as they are.

    If the first pass of all is one of these, it begins where the generators were when the run was
    saved, whatever the script has drawn since. Other passes may have advanced them by the time that
    a later one begins. Where nothing was saved, they stay where the script has put them.
    """

    def __init__(self, states: dict[str, Any] | None, device: torch.device) -> None:
        self._states, self._device = states, device
        self._is_next = states is not None

    def begin_pass(self) -> None:
        """To be called before a pass draws its order anew."""
        if not self._is_next:
            self._states = generator_states(self._device)
        self._is_next = False

    def begin_other_pass(self) -> None:
        """To be called before a pass begins that does not go on, and draws from them."""
        self._is_next = False

    def restore(self) -> None:
        if self._states is not None:
            set_generator_states(self._states, self._device)


class Resumption:
    """A run that goes on: until something is trained in it, it can go back to where it was saved.

    A script that looks at a batch, or evaluates, before its loop does so in each run. That is not
    to take from the passes and random numbers which follow. After a pass that came to its end it
    goes back once: a loop that trains with none of its batches would have no end otherwise.

    `generators` are for the passes that go on; `open` has the passes that are under way, of all
    loaders, the first of each.
    """

    def __init__(
        self, states: dict[str, Any] | None, device: torch.device, progress: Progress
    ) -> None:
        self._saved = states, device
        self._progress, self._num_trained = progress, progress.num_trained
        self._seeks: list[Callable[[Resumption], None]] = []
        self.generators = SavedRng(*self._saved)
        self.open: list[Pass] = []
        self._can_go_back_from_end = True

    def can_go_back(self, *looks: Pass) -> bool:
        """Return whether nothing was trained since, and no passes are under way but these."""
        is_at_end = any(one.is_exhausted for one in looks)
        has_trained = self._num_trained != self._progress.num_trained
        can_go_back = self._can_go_back_from_end or not is_at_end
        return can_go_back and not has_trained and self.open == [*looks]

    def seek(self, seek: Callable[[Resumption], None]) -> None:
        """Let a loader stand where it was saved, now and whenever the run goes back."""
        self._seeks.append(seek)
        seek(self)

    def go_back(self) -> None:
        """Let all loaders and generators be as they were saved."""
        self._can_go_back_from_end &= not any(one.is_exhausted for one in self.open)
        self.generators, self.open = SavedRng(*self._saved), []
        for seek in self._seeks:
            seek(self)
        self.generators.restore()


class Pass:
    """One pass over a loader.

    Args:
        epoch: its number.
        owners: samplers and loaders, whose generators belong to the pass.
        before: what was left out of it.
        drawn_by: what draws its samples; None if the data set may do so.
        resumed: the run that goes on, if this is the first pass over its loader.
        is_rest: whether it goes on itself.
    """

    def __init__(
        self,
        epoch: int,
        owners: Iterable[Any],
        before: Offset,
        drawn_by: Iterable[Any] | None,
        resumed: Resumption | None = None,
        *,
        is_rest: bool = False,
    ) -> None:
        self.epoch, self.before = epoch, before
        self.resumed, self.is_rest = resumed, is_rest
        self.has_trained = False  # whether something was trained after a batch of it
        self.is_exhausted = False  # whether the script has asked for a batch after the last one
        self.rounds = 0  # that the script was given
        self.samples = 0  # in these, on all ranks together
        self.is_complete = False
        self.stream: Any = None  # the state of the data set after the batches that were given
        self.ahead: dict[str, Any] | None = None  # the generators then, if loading ahead may draw
        self._owners, self._drawn_by = owners, drawn_by
        self._note_generators()
        self._is_drawn = False

    def drawing(self) -> None:
        """Note the generators as they are when the first index is drawn.

        By then torch has drawn the seed of loader workers, unless these outlive their first pass.
        """
        self._note_generators()
        self._is_drawn = True

    def _note_generators(self) -> None:
        self._global = _states_for(self._drawn_by)
        self._own = [one.get_state() for one in generators_of(self._owners)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "global": self._global,
            "own": self._own,
            "is_drawn": self._is_drawn,  # the generators are as they were when it was drawn
            "stream": self.stream,
            "ahead": self.ahead,
        }


class Left(NamedTuple):
    """Where a loop has left its passes before their end: how many, one after the other."""

    after: Offset
    times: int


class ResumePoint(NamedTuple):
    """The state of a pass that another run has begun, and that is the next one here.

    With `only_skipped` it goes on only where the script itself leaves its first batches out.
    """

    state: dict[str, Any]
    only_skipped: bool


class Passes:
    """The passes over a loader, with and without its first batches.

    What is trained belongs to the pass that has begun last, of those under way. Once something was
    trained, a pass in which nothing is, such as a look at a batch or an evaluation, is no epoch.

    `epochs` is how many have ended, in earlier runs as well; where nothing was trained in any, how
    many have come to their ends. `samples` are those that they have given.
    """

    def __init__(self, progress: Progress) -> None:
        self.following = 0  # the number of the next one
        self.has_lasting_workers = False  # that outlive a pass were started, in earlier runs too
        self.is_looked_at = False  # a pass without training has come after one with it, not inside
        self.left: Left | None = None  # where those with training were left; None after a whole one
        self.pending: ResumePoint | None = None  # the one that goes on here
        self.interrupted: Resumption | None = None  # until the first pass over this loader
        self._has_trained = self._keeps_looks = False
        self._open: list[Pass] = []  # the one that has begun last is the last
        self._progress, self._num_trained = progress, progress.num_trained
        self.count_from(0, 0)

    def count_from(self, epochs: int, samples: int) -> None:
        """Let so many have ended by now."""
        self.epochs, self.samples = self._first = epochs, samples

    def resume(
        self, position: dict[str, Any], pending: ResumePoint | None, interrupted: Resumption
    ) -> None:
        """Stand where a run was saved."""
        self._note_training()
        self.following, self.pending = position["following"], pending
        self.interrupted = interrupted
        self.count_from(position.get("epochs", position["following"]), position["samples"])
        self.has_lasting_workers = position["has_lasting_workers"]
        self.is_looked_at = position.get("is_looked_at", False)
        self._has_trained = position["has_trained"]
        self._keeps_looks = position.get("keeps_looks", False)
        left = position.get("left")
        self.left = None if left is None else Left(Offset(*left[0]), left[1])

    # ------------------------------------------------------------------ which of them train

    def _note_training(self) -> None:
        if self._num_trained == self._progress.num_trained:
            return
        self._num_trained = self._progress.num_trained
        for one in self._open[-1:]:
            one.has_trained = True
            if not self._has_trained:  # what came before was no epoch
                self._has_trained, (self.epochs, self.samples) = True, self._first

    @property
    def has_trained(self) -> bool:
        """Whether something was trained in a pass, in earlier runs as well."""
        self._note_training()
        return self._has_trained

    @property
    def current(self) -> Pass | None:
        """The pass that is under way: of several, the last one in which something was trained."""
        self._note_training()
        trained = [one for one in self._open if one.has_trained]
        return next(reversed(trained or self._open), None)

    @property
    def keeps_looks(self) -> bool:
        """Whether the script looks at a batch with an iterator that it does not end."""
        current = self.current
        before = self._open[: self._open.index(current)] if current is not None else []
        return self._keeps_looks or any(not one.has_trained for one in before)

    # ------------------------------------------------------------------ beginnings and ends

    def go_back(self) -> None:
        """Undo what the script has done with loaders since it goes on, before its loop begins."""
        resumed, is_rest = self.interrupted, self.pending is not None and self.has_trained
        if resumed is None or not (is_rest and resumed.can_go_back()):
            is_kept = self._keeps_looks and len(self._open) == 1
            resumed = self._looked_at(self._open[0]) if is_kept else None
        if resumed is not None:
            resumed.go_back()

    def begin(self, new: Pass) -> None:
        """Note that a pass begins."""
        self._note_training()
        self._open.append(new)
        if new.resumed is not None:
            new.resumed.open.append(new)

    def end(self, ended: Pass, given: Offset) -> None:
        """Count a pass that will give no more batches than those that were given."""
        self._note_training()
        self._open = [one for one in self._open if one is not ended]
        looked_at, resumed = self._looked_at(ended), ended.resumed
        ended.resumed = None  # which holds the loaders
        if looked_at is not None:
            looked_at.go_back()
            return
        if resumed is not None and ended in resumed.open:
            resumed.open.remove(ended)
        if ended.has_trained:
            times = self.left.times if self.left is not None and self.left.after == given else 0
            self.left = None if ended.is_complete else Left(given, times + 1)
            self._keeps_looks |= any(not one.has_trained for one in self._open)
            self._open = [one for one in self._open if one.has_trained]
        elif self._has_trained:
            self.is_looked_at |= not self._open
            return
        self.epochs += ended.has_trained or ended.is_complete
        self.samples += ended.samples

    def _looked_at(self, one: Pass) -> Resumption | None:
        """Return the run that goes on, if a pass is a look at this loader before the loop.

        Where the script also looks at it between its epochs, a look there is part of the training.
        """
        is_look = self._has_trained and (one.is_rest or not self.is_looked_at)
        can_go_back = one.resumed is not None and one.resumed.can_go_back(one)
        return one.resumed if is_look and can_go_back else None


def _states_for(drawn_by: Iterable[Any] | None) -> dict[str, Any]:
    """Return the states of the global generators that these may draw from.

    torch's own samplers draw from torch's: Python's and numpy's take 40 us to read, in each pass.
    """
    if drawn_by is None or any(not type(one).__module__.startswith("torch.") for one in drawn_by):
        return generator_states(_CPU)
    return {"torch": torch.get_rng_state()}


def set_generators_ahead(state: dict[str, Any]) -> None:
    """Let the batch that was loaded ahead in the pass with this state draw what it drew."""
    if state.get("ahead") is not None:
        set_generator_states(state["ahead"], _CPU)


def set_generators_to_begin(state: dict[str, Any], owners: Iterable[Any]) -> None:
    """Let a pass draw what the one with this state drew."""
    set_generator_states(state["global"], _CPU)
    for generator, own in zip(generators_of(owners), state["own"], strict=False):
        generator.set_state(own)


def generators_of(owners: Iterable[Any]) -> list[torch.Generator]:
    """Return the generators that these objects have, each once."""
    found = [getattr(one, "generator", None) for one in owners]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def counts_samples(source: Any) -> bool:
    """Return whether the batches of `source` are consecutive samples of its sampler."""
    return type(source) is BatchSampler


def after(
    source: Any,
    taken: Offset,
    size: int = 0,
    counted: Callable[[Iterator[Any]], Iterator[Any]] = iter,
) -> tuple[Iterator[Any], list[Any]]:
    """Return the batches of a batch sampler (or of a sampler) without those that were taken.

    And up to `size` of the epoch's first samples, of those taken. `counted` sees all that is drawn,
    also what is left out, and returns it.
    """
    if counts_samples(source):
        if not taken.samples and counted is iter:
            return iter(source), []
        samples = counted(iter(source.sampler))
        first = list(islice(samples, min(size, taken.samples)))
        rest = islice(samples, taken.samples - len(first), None)
        return iter(BatchSampler(rest, source.batch_size, source.drop_last)), first
    batches = counted(iter(source))
    first = list(islice(batches, taken.batches))
    flat = chain.from_iterable(one if isinstance(one, list) else [one] for one in first)
    return batches, list(islice(flat, size)) if size else [*flat]


class Indices:
    """The indices that samplers and batch samplers draw, as they are."""

    def after(self, source: Any, taken: Offset, size: int = 0) -> tuple[Iterator[Any], list[Any]]:
        """Return what a source draws after what was taken; see `after`."""
        return after(source, taken, size)

    def to_load(self, given: Iterator[Any]) -> Iterator[Any]:
        """Return what a loader is given, in a form for its data set."""
        return given

    def rounds_to_load(self, rounds: Iterator[Round]) -> Iterator[Round]:
        """Return rounds, in a form for a data set of rounds."""
        return rounds


class LookaheadSampler:
    """Batches of indices, one of which is drawn ahead, so that the last one is known.

    Not where the loader loads a batch ahead (`is_ahead=False`): that tells which one is last.
    """

    def __init__(
        self, source: Any, indices: Indices, skip: Offset, *, is_ahead: bool = True
    ) -> None:
        self._source, self._indices, self._skip, self._is_ahead = source, indices, skip, is_ahead
        self.has_more = False
        self.start = FRESH  # of the pass; torch begins it twice where there are workers

    def __len__(self) -> int:
        return max(0, len(self._source) - self._skip.batches)

    def __iter__(self) -> Iterator[Any]:
        return self._indices.to_load(self._one_ahead(self.start))

    def _one_ahead(self, start: Start) -> Iterator[Any]:
        start.drawing()
        source, _ = self._indices.after(self._source, start.taken or self._skip)
        following = next(source, _END)
        start.ready()
        while following is not _END:
            if self._is_ahead:
                given, following = following, next(source, _END)
                self.has_more = following is not _END
                yield given
            else:
                yield following
                following = next(source, _END)


_END = object()
