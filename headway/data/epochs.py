"""The epochs of a loader, the passes over it, and the position from which a run resumes."""

from __future__ import annotations

import copy
from array import array
from typing import TYPE_CHECKING, Any

from headway.data.division import Offset
from headway.data.order import Draws, Place
from headway.data.script_loaders import is_of_datasets

if TYPE_CHECKING:
    from headway.data.passes import LoaderSet


class Pass:
    """A pass over a loader, starting at its place."""

    def __init__(self, owner: Epochs, place: Place, depth: int, line: str) -> None:
        self.owner, self.place = owner, place
        self.depth = depth  # number of other open passes over its loader when it began
        self.line = line  # line of the script that created its iterator
        self.ordinal = 0  # among the loader's passes in an epoch of `run.epochs`; 0: in a loop
        self.rounds = self.samples = 0  # global batches yielded to the script, and samples in them
        self.is_complete = False  # whether the last batch was yielded
        self.is_exhausted = False  # whether the script requested a batch after that
        self.is_over = False
        self.has_trained = False  # whether an optimizer step was taken in it
        self.has_led = False  # whether it was the first to request a batch in a step
        self.seen = -1  # the training count when it yielded its latest batch
        self.sums = array("L")  # running checksums of batches from a custom sampler
        self.checksum = 0  # of the batches from a stream without state
        self.stream: Any = None  # dataset state after the batches yielded so far
        # initial states of the loader's own generators, if resuming rereads batches
        self.generators: list[Any] | None = None

    @property
    def reread(self) -> Offset:
        """Batches to read again and drop: none if the dataset resumes from its state."""
        return self.place.taken if self.place.stream is None else Offset()

    @property
    def following(self) -> Place:
        """The start of the next epoch."""
        owner, place = self.owner, self.place
        first = owner.draws.first if place.is_new else place.first
        given = min(place.taken.batches + self.rounds * owner.num_batches, len(self.sums))
        before = (given, self.sums[given - 1], first) if given else None
        return Place(place.epoch + 1, depth=self.depth, before=before)


class Epochs:
    """Tracks the epochs of a loader and its position."""

    def __init__(self, run: LoaderSet, draws: Draws, num_batches: int, batch_size: int) -> None:
        self.run, self.draws = run, draws
        self.num_batches = num_batches  # batches of the script's loader per global batch
        self.batch_size = batch_size  # samples in each; 0 if unknown
        self.stream: Any = None  # a dataset with `state_dict()`
        self.place = Place()  # where the next pass begins
        self.has_trained = False  # whether any epoch has trained, including earlier runs
        self.leads = False  # whether its passes were the first to request a batch in a step
        self.num_begun = 0  # passes outside of loops in the current epoch of `run.epochs`
        self.over: list[int] = []  # ordinals of those that are completed epochs
        self._samples = 0  # in completed epochs
        self._is_left_within = False  # whether the latest epoch ended early
        self._left_after = 0  # batches in the latest epoch that ended early
        self._num_compared = 2  # epochs ended early since resuming within one

    def end(self, pass_: Pass, *, is_with_others: bool) -> None:
        """Count a finished pass as an epoch."""
        self.place, self._is_left_within = pass_.following, not pass_.is_complete
        self._samples += pass_.samples
        if pass_.ordinal:
            self.over.append(pass_.ordinal)
        taken = pass_.place.taken.batches
        if (taken and self._left_after) or not (pass_.is_exhausted or is_with_others):
            left_after = taken + pass_.rounds * self.num_batches
            if self._num_compared < 2 and self._left_after not in (0, left_after):
                self.run.report(_LEFT)  # the script counts batches itself
            self._num_compared += 1
            self._left_after = left_after

    @property
    def stream_state(self) -> Any:
        """The stream's state at the start of an epoch; None if the stream creates it."""
        return None if self._is_left_within else copy.deepcopy(self.stream.state_dict())

    def skip_empty(self) -> bool:
        """Return whether the next pass ended before the run was resumed; if so, count it."""
        if not self.run.is_outermost or self.num_begun + 1 not in self.over:
            return False
        self.num_begun += 1
        return True

    def set(self, number: int) -> None:
        """Set the epoch number of the next pass, unless a resumed run skips passes."""
        is_resumed = bool(self.over) and not self.run.has_trained
        if self.place.epoch != number and not is_resumed:
            self.place = Place(number)

    def resume(self, place: Place, position: dict[str, Any]) -> None:
        """Restore the saved position."""
        self.place, self._samples = place, position["samples"]
        self.has_trained, self._left_after = position["has_trained"], position["left_after"]
        self.leads, self.over = position["leads"], [*position["over"]]
        self._num_compared = 0 if place.taken.batches else 2

    @property
    def current(self) -> Pass | None:
        """The pass of the current epoch, if any."""
        self.run.attribute()
        is_any = not self.run.counts_training
        passes = [pass_ for pass_ in self.run.open if pass_.owner is self]
        return next((pass_ for pass_ in reversed(passes) if pass_.has_trained or is_any), None)

    @property
    def number(self) -> int:
        """The number of the current epoch, or of the next if that is complete."""
        return self._resume_from.epoch

    @property
    def _resume_from(self) -> Place:
        current = self.current
        if current is None:
            return self.place
        return current.following if current.is_complete else current.place

    @property
    def samples(self) -> int:
        """Number of samples yielded in epochs."""
        current = self.current
        return self._samples + (0 if current is None else current.samples)

    def offset_after(self, rounds: int) -> Offset:
        """Convert a number of global batches to an offset in the script's loader."""
        batches = rounds * self.num_batches
        return Offset(batches, batches * self.batch_size)

    def resume_place(self) -> dict[str, Any]:
        """Return the position from which a run resumes."""
        current, place = self.current, self._resume_from
        if current is not None and not current.is_complete:
            taken, since = place.taken, self.offset_after(current.rounds)
            given = Offset(taken.batches + since.batches, taken.samples + since.samples)
            sums = [0, *current.sums[given.batches - 1 : given.batches]]
            first = self.draws.first if place.is_new else place.first
            checksum = sums[-1] or current.checksum
            place = Place(place.epoch, given, checksum, first, current.stream, depth=current.depth)
        elif self.stream is not None and place.stream is None:
            place = place._replace(stream=self.stream_state)
            if place.stream is None and not is_of_datasets(self.stream):
                self.run.report(_LEFT_STREAM)
        return {
            "place": [*place._replace(taken=[*place.taken])],  # type: ignore[arg-type]
            "samples": self.samples,
            "has_trained": self.has_trained,
            "left_after": self._left_after,
            "leads": self.leads,
            "over": [*self.over],
        }


_LEFT_STREAM = (
    "note: a loop over a stream with state_dict() ended early, and this checkpoint was saved before"
    " the next loop: a resumed run starts a new stream, which is not exact if the stream continues"
    " after a break. End the epoch in the stream itself"
)
_LEFT = (
    "note: a loop over a loader ended after a different number of batches than the previous loop:"
    " if the script counts batches, its count restarted when this run resumed, which is not exact."
    " Count optimizer steps from run.step"
)
