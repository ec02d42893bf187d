"""Epochs and iterations of a loader, and the position from which a run resumes."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headway.data.order import Draws
from headway.data.script_loaders import is_of_datasets

if TYPE_CHECKING:
    from headway.data.loader_set import LoaderSet


class StartPosition(NamedTuple):
    """The start of an iteration: its epoch, and the samples to skip."""

    epoch: int = 0
    taken: int = 0  # samples of all ranks; batches, if their size is unknown
    checksum: int = 0  # of the taken batches
    # states from which the epoch is drawn, instead of seed and epoch: those of torch's first epoch,
    # or of the generators that are attributes of a stream without state
    first: Sequence[Any] | None = None
    stream: Any = None  # the dataset's state after the taken batches
    depth: int = 0  # number of enclosing iterations over the loader when the epoch began
    before: tuple[int, int, Any] | None = None  # batches, checksum and `first` of the last epoch


class LoaderIteration:
    """An iteration over a loader, from a start position."""

    def __init__(self, owner: Epochs, start: StartPosition, depth: int, line: str) -> None:
        self.owner, self.start = owner, start
        self.depth = depth  # number of enclosing iterations over its loader
        self.line = line  # line of the script that created its iterator
        self.ordinal = 0  # number in an epoch of `run.epochs`; 0 if nested
        self.is_new = owner.draws.seed is None  # whether the loader's order has not been drawn yet
        self.first = start.first  # see `StartPosition`
        self.rounds = self.samples = 0  # global batches yielded to the script, and samples in them
        self.is_complete = False  # whether the last batch was yielded
        self.is_exhausted = False  # whether the script requested a batch after the last
        self.is_over = False
        self.has_trained = False  # whether an optimizer step was taken in it
        self.has_led = False  # whether it was the first to request a batch in a step
        self.seen = -1  # `num_trained` when it yielded its latest batch
        self.sums = array("L")  # running checksums of batches from a custom sampler
        self.checksum = 0  # of the batches from a stream without state
        self.stream: Any = None  # dataset state after the batches yielded so far

    @property
    def reread(self) -> int:
        """How much of `start.taken` to reread; 0 if the dataset's state is restored."""
        return self.start.taken if self.start.stream is None else 0

    @property
    def taken(self) -> int:
        """`StartPosition.taken` after the batches yielded so far."""
        return self.start.taken + self.rounds * self.owner.per_round

    @property
    def position(self) -> StartPosition:
        """The position from which a run resumes that stops after the batches yielded so far."""
        if self.is_complete:
            return self.next_epoch
        taken, number = self.taken, self.taken // self.owner.unit
        checksum = [self.checksum, *self.sums[number - 1 : number]][-1]
        own = self.first, self.stream, self.depth
        return StartPosition(self.start.epoch, taken, checksum, *own)

    @property
    def next_epoch(self) -> StartPosition:
        given = min(self.taken // self.owner.unit, len(self.sums))
        before = (given, self.sums[given - 1], self.first) if given else None
        return StartPosition(self.start.epoch + 1, depth=self.depth, before=before)


class Epochs:
    """Tracks a loader's epochs and its position."""

    def __init__(self, run: LoaderSet, draws: Draws, num_batches: int, batch_size: int) -> None:
        self.run, self.draws = run, draws
        self.num_batches = num_batches  # batches of the script's loader per global batch
        self.batch_size = batch_size  # samples in each; 0 if unknown
        self.unit = batch_size or 1  # of `StartPosition.taken` in a batch
        self.per_round = num_batches * self.unit  # in a global batch
        self.stream: Any = None  # a dataset with `state_dict()`
        self.next_start = StartPosition()  # of the next iteration
        self.has_trained = False  # whether any epoch has trained, including earlier runs
        self.leads = False  # whether its iterations were the first to request a batch in a step
        self.num_begun = 0  # outermost iterations in the current epoch of `run.epochs`
        self.over: list[int] = []  # ordinals of those that were completed
        self._samples = 0  # in completed epochs
        self._is_left_within = False  # whether the latest epoch ended early
        self._left_after = 0  # `taken` at the end of the latest epoch that ended early
        self._num_compared = 2  # epochs ended early since resuming

    def end(self, iteration: LoaderIteration, *, is_with_others: bool) -> None:
        """Count a finished iteration as an epoch."""
        self.next_start, self._is_left_within = iteration.next_epoch, not iteration.is_complete
        self._samples += iteration.samples
        if iteration.ordinal:
            self.over.append(iteration.ordinal)
        is_resumed = iteration.start.taken and self._left_after
        if is_resumed or not (iteration.is_exhausted or is_with_others):
            is_compared = self.run.resumes_within and self._num_compared < 2
            if is_compared and self._left_after not in (0, iteration.taken):
                self.run.report(_LEFT)  # the script counts batches itself
            self._num_compared += 1
            self._left_after = iteration.taken

    @property
    def stream_state(self) -> Any:
        """The stream's state at the start of an epoch; None after an epoch that ended early."""
        return None if self._is_left_within else copy.deepcopy(self.stream.state_dict())

    def skip_empty(self) -> bool:
        """If the next iteration was finished before the run resumed, count it and return True."""
        if not self.run.is_outermost or self.num_begun + 1 not in self.over:
            return False
        self.num_begun += 1
        return True

    def set(self, number: int) -> None:
        """Set the next iteration's epoch number, unless a resumed run is skipping iterations."""
        is_resumed = bool(self.over) and not self.run.has_trained
        if self.next_start.epoch != number and not is_resumed:
            state = None if self.next_start.taken else self.next_start.stream
            self.next_start = StartPosition(number, stream=state)

    def resume(self, start: StartPosition, position: dict[str, Any]) -> None:
        self.next_start, self._samples = start, position["samples"]
        self.has_trained, self._left_after = position["has_trained"], position["left_after"]
        self.leads, self.over = position["leads"], [*position["over"]]
        self._num_compared = 0
        self.run.resumes_within |= start.taken > 0

    @property
    def current(self) -> LoaderIteration | None:
        """The iteration of the current epoch, if any."""
        self.run.attribute()
        is_any = not self.run.counts_training
        iterations = [each for each in self.run.open if each.owner is self]
        return next((each for each in reversed(iterations) if each.has_trained or is_any), None)

    @property
    def number(self) -> int:
        """The number of the current epoch; once that epoch is complete, the number of the next."""
        return self._position.epoch

    @property
    def _position(self) -> StartPosition:
        current = self.current
        return self.next_start if current is None else current.position

    @property
    def samples(self) -> int:
        current = self.current
        return self._samples + (0 if current is None else current.samples)

    def state_dict(self) -> dict[str, Any]:
        """Return the position from which a run resumes."""
        start = self._position
        if self.stream is not None and start.stream is None:
            start = start._replace(stream=self.stream_state)
            if start.stream is None and not is_of_datasets(self.stream):
                self.run.report(_LEFT_STREAM)
        return {
            "place": [*start],
            "samples": self.samples,
            "has_trained": self.has_trained,
            "left_after": self._left_after,
            "leads": self.leads,
            "over": [] if self.run.ends_epoch else [*self.over],
        }


_LEFT_STREAM = (
    "note: a loop over a stream with state_dict() ended early, and this checkpoint was saved before"
    " the next loop. A resumed run starts a new stream, so it does not resume exactly if the stream"
    " continues after a break. End the epoch in the stream itself"
)
_LEFT = (
    "note: a loop over a loader ended after a different number of batches than the previous loop."
    " If the script counts batches, its count restarted when this run resumed, and the run did not"
    " resume exactly. Count optimizer steps from run.step"
)
