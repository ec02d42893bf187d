"""Where a pass over a prepared loader stands, and how another run goes on there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain, cycle, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler

from headway.contract.records import channel
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
        """Divide a round of batches.

        Args:
            spare: samples to repeat where ranks must have equally many.
            size: samples of a full batch; 0 if batches have sizes of their own.
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
    """How a pass begins.

    Args:
        taken: what is left out of a pass that another run has begun, with the batches that the
            script itself leaves out; the samples of a map data set are drawn anew, not loaded.
            None: what every pass leaves out.
        begun: to be called once torch's iterator is made, which draws a seed for loader workers.
        drawing: to be called before the first index is drawn.
        ready: to be called once those that are left out are drawn, and before the next samples are
            loaded.
        loaded: to be called once the first batch is there, where it is loaded ahead.
    """

    taken: Offset | None = None
    begun: Callable[[], None] = _nothing
    drawing: Callable[[], None] = _nothing
    ready: Callable[[], None] = _nothing
    loaded: Callable[[], None] = _nothing


FRESH = Start()


class SavedRng:
    """The global generators of a rank that goes on, which the passes that go on leave as they are.

    If the first pass of all is one of these, it begins where the generators were when the run was
    saved, whatever the script has drawn since. Other passes may have advanced them by the time that
    a later one begins.

    Args:
        states: those that were saved; None leaves the generators where the script has put them.
        device: whose generators are among them.
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


class Pass:
    """One pass over a loader.

    Args:
        epoch: its number.
        owners: samplers and loaders, whose generators belong to the pass.
        before: what was left out of it.
        drawn_by: what draws its samples; None if the data set may do so.

    Attributes:
        stream: the state of the data set after the batches that were given, if it has one.
        ahead: that of the generators then, if the next batch was loaded ahead and may draw.
    """

    def __init__(
        self, epoch: int, owners: Iterable[Any], before: Offset, drawn_by: Iterable[Any] | None
    ) -> None:
        self.epoch, self.before = epoch, before
        self.rounds = 0  # that the script was given
        self.samples = 0  # in these, on all ranks together
        self.num_steps = channel.num_steps  # of optimizers, before it
        self.is_complete = False
        self.stream: Any = None
        self.ahead: dict[str, Any] | None = None
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
    """Where a loop has left its passes before their end.

    Args:
        after: what each of them had given.
        times: how many have, one after the other.
    """

    after: Offset
    times: int


class ResumePoint(NamedTuple):
    """A pass that another run has begun, and that is the next one here.

    Args:
        state: of that pass, and what it has taken.
        only_skipped: it goes on only where the script itself leaves its first batches out.
    """

    state: dict[str, Any]
    only_skipped: bool


class Passes:
    """The passes over a loader, with and without its first batches."""

    following = 0
    """The number of the next one."""
    current: Pass | None = None
    pending: ResumePoint | None = None
    interrupted: SavedRng | None = None
    """The generators of this rank, until the first pass of a run that goes on."""
    samples = 0
    """Those of all passes that have ended, in earlier runs as well."""
    has_trained = False
    """Whether an optimizer has stepped in one of these."""
    has_lasting_workers = False
    """Whether workers that outlive a pass were started, in earlier runs as well."""
    left: Left | None = None
    """Where the passes before, in which an optimizer stepped, were left; None after a whole one."""

    def end(self, ended: Pass, given: Offset) -> None:
        """Count a pass that will give no more batches than those that were given."""
        has_trained = ended.num_steps != channel.num_steps
        if ended.is_complete:
            self.left = None
        elif has_trained:  # a look at the first batch says nothing about the loop
            times = self.left.times if self.left is not None and self.left.after == given else 0
            self.left = Left(given, times + 1)
        self.samples += ended.samples
        self.has_trained |= has_trained
        if self.current is ended:
            self.current = None


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

    Args:
        size: how many of the epoch's first samples to return as well; as many as were taken at
            most.
        counted: sees all that is drawn, also what is left out, and returns it.
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

    Attributes:
        has_more: whether another follows the one that was given last.
    """

    def __init__(self, source: Any, indices: Indices, skip: Offset) -> None:
        self._source, self._indices, self._skip = source, indices, skip
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
            given, following = following, next(source, _END)
            self.has_more = following is not _END
            yield given


_END = object()
