"""Tracks the iterations and epochs of a run's loaders.

An iteration starts at its loader's position. Once an optimizer step is taken during an iteration,
the iteration counts as an epoch, and the position moves to the start of the next epoch. Iterations
without an optimizer step, such as an evaluation or a peek at a batch, do not move the position.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch

from headway.data.order import Draws
from headway.data.pending_checkpoint import KEPT, PendingCheckpoint
from headway.data.script_loaders import is_of_datasets
from headway.distributed.world import rank_and_size
from headway.errors import Code, UsageError
from headway.ipc.progress import Progress
from headway.ipc.stderr import log


class StartPosition(NamedTuple):
    """The start of an iteration: its epoch, and the samples to skip."""

    epoch: int = 0
    taken: int = 0  # samples of all ranks; batches, if their size is unknown
    checksum: int = 0  # of the taken batches
    # states from which the epoch is drawn, instead of seed and epoch: those of torch's first epoch,
    # or of the generators that are attributes of a stream without state; or, if each rank reads its
    # own data, the state of the stream
    first: Any = None
    stream: Any = None  # the dataset's state after the taken batches
    depth: int = 0  # number of enclosing iterations over the loader when the epoch began
    before: tuple[int, int, Any] | None = None  # batches, checksum and `first` of the last epoch


class LoaderIteration:
    """An iteration over a loader, from a start position."""

    def __init__(self, owner: Epochs, start: StartPosition, line: str = "") -> None:
        self.owner, self.start = owner, start
        self.line = line  # line of the script that created its iterator
        self.rounds = self.samples = 0  # global batches yielded to the script, and samples in them
        # the iterations open when it began, with their `rounds`
        self.around = {each: each.rounds for each in owner.run.open}
        self.depth = sum(each.owner is owner for each in self.around)  # over the same loader
        self.last_within = 0  # `rounds` at the end of the latest loop in which it yielded batches
        self.saved_until = 0  # `rounds` at the latest `save_state()`; see `LoaderSet.saving_at_end`
        self.thread = get_ident()  # that requests its batches
        self.ordinal = 0  # number in an epoch of `run.epochs`; 0 if nested
        self.is_new = owner.draws.seed is None  # whether the loader's order has not been drawn yet
        self.first = start.first  # see `StartPosition`
        self.is_complete = False  # whether the last batch was yielded
        self.is_exhausted = False  # whether the script requested a batch after the last
        self.is_over = False
        self.has_trained = False  # whether an optimizer step was taken in it
        self.has_led = False  # whether it was the first to request a batch in a step
        self.seen = -1  # `num_trained` when it yielded its latest batch
        self.sums = array("L")  # running checksums of batches from a custom sampler
        self.checksum = 0  # of the batches from a stream without state
        self.stream: Any = None  # dataset state after the batches yielded so far
        self.outer_stream: Any = None  # dataset state of the enclosing iteration when it began
        self.reread_batch: list[Any] = []  # the first of the epoch, if it was reread

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
        checksum = self._checksum_of(self.taken // self.owner.unit)
        own = self.first, self.stream, self.depth
        return StartPosition(self.start.epoch, self.taken, checksum, *own)

    @property
    def next_epoch(self) -> StartPosition:
        given = min(self.taken // self.owner.unit, len(self.sums))
        before = (given, self.sums[given - 1], self.first) if given else None
        return StartPosition(self.start.epoch + 1, depth=self.depth, before=before)

    def compare_reread(self) -> None:
        """Report if the batches that were drawn or read again are not those of the start."""
        number = self.start.taken // self.owner.unit
        if self.start.checksum not in (0, self._checksum_of(number)):
            self.owner.run.report(_OTHER_ORDER.format(number))

    def _checksum_of(self, batches: int) -> int:
        return [self.checksum, *self.sums[batches - 1 : batches]][-1]

    @property
    def takes_turns(self) -> bool:
        """Whether an earlier iteration over the same loader has yielded batches since it began."""
        return any(
            each.owner is self.owner and each.rounds != rounds
            for each, rounds in self.around.items()
        )

    @property
    def is_dropped(self) -> bool:
        """Whether the script has dropped the iterator at which `save_state()` saved a position."""
        return self.is_over and not self.is_complete and self.rounds <= self.saved_until

    def end(self, still_open: Sequence[LoaderIteration]) -> None:
        self.is_over = True
        for each in still_open:
            if each.rounds != self.around.get(each, 0):
                each.last_within = each.rounds
        self.around = {}  # refers to iterations that refer to earlier ones


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
        self.trained: LoaderIteration | None = None  # the latest iteration that has trained
        self.leads = False  # whether its iterations were the first to request a batch in a step
        self.num_begun = 0  # outermost iterations in the current epoch of `run.epochs`
        self.over: list[int] = []  # ordinals of those that were completed
        self.saved_in: list[int] = []  # of those in the body of whose last batch the run was saved
        self._samples = 0  # in completed epochs
        self._is_left_within = False  # whether the latest epoch ended early
        self._left_after = 0  # `taken` at the end of the latest epoch that ended early
        self._ends_stepped = True  # whether each epoch ended with an optimizer step
        self._num_compared = 2  # epochs ended early since resuming

    def end(self, iteration: LoaderIteration, *, is_with_others: bool) -> None:
        """Count a finished iteration as an epoch."""
        self.next_start, self._is_left_within = iteration.next_epoch, not iteration.is_complete
        is_resumed = self.run.resumes_within and iteration.start.taken
        has_pending = self.run.num_pending() > 0
        if is_resumed and has_pending and self._ends_stepped and iteration.start.epoch:
            self.run.report(COUNTED)
        self._ends_stepped &= not has_pending
        self._samples += iteration.samples
        if iteration.ordinal:
            self.over.append(iteration.ordinal)
        has_left = iteration.start.taken and self._left_after
        if has_left or not (iteration.is_exhausted or is_with_others):
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
        if self.num_begun in self.saved_in:
            self.run.arrive()
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
        self.saved_in = position["saved_in"]
        self._ends_stepped = position["ends_stepped"]
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
    def position(self) -> StartPosition:
        """The position in the current epoch; once that epoch is complete, the start of the next."""
        current = self.current
        return self.next_start if current is None else current.position

    @property
    def samples(self) -> int:
        current = self.current
        return self._samples + (0 if current is None else current.samples)

    def state_dict(self) -> dict[str, Any]:
        """Return the position from which a run resumes."""
        start = self.position
        if self.stream is not None and start.stream is None:
            start = start._replace(stream=self.stream_state)
            if start.stream is None and not is_of_datasets(self.stream):
                self.run.report(_LEFT_STREAM)
        own = [each for each in self.run.open if each.owner is self]
        if any(each.has_trained and each.thread != get_ident() for each in own):
            self.run.report(_IN_THREAD)
        in_last_batch = [each.ordinal for each in own if each.ordinal and each.is_complete]
        return {
            "place": [*start],
            "samples": self.samples,
            "has_trained": self.has_trained,
            "left_after": self._left_after,
            "ends_stepped": self._ends_stepped,
            "leads": self.leads,
            "over": [] if self.run.ends_epoch else [*self.over, *in_last_batch],
            "saved_in": in_last_batch,
        }


class LoaderSet:
    """State shared by the loaders of a training run."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.counts_training = False  # whether there is an optimizer; else every iteration counts
        # returns the number of backward passes since the latest optimizer step
        self.num_pending: Callable[[], int] = int
        self.has_begun = False  # whether an iteration has started
        self.open: list[LoaderIteration] = []
        self.epoch: int | None = None  # of `count_epochs`, if the script uses it
        self.resumes_within = False  # whether a loader was resumed within its epoch
        self.keeps_batches = False  # whether it has trained on batches that the script kept
        self.checkpoint = PendingCheckpoint(self)
        self.saved_after: int | None = None  # training count at `save_state()` within a loop
        self.ends_epoch = False  # whether the checkpoint ends an epoch of `count_epochs`
        self.earlier: list[LoaderIteration] | None = None  # open when `epoch` began, during it
        self._is_counting = False  # whether the script uses `count_epochs`
        self._counts_epochs = False  # whether the script uses that or `run.epoch`
        self._closed: list[LoaderIteration] = []  # closed since the last training step
        self._trained = progress.num_trained  # training count already attributed
        self._restore: Callable[[], object] = int  # restores the saved generator states
        self._is_beginning = False  # whether an iteration is about to start
        self._is_between = False  # whether the run was resumed from a checkpoint outside of loops
        self._continues = False  # whether the script is where that checkpoint was saved
        self._was_in_last = False  # whether it was saved in the body of a loop's last batch
        self._resumed_at = progress.num_trained
        self._reported: set[str] = set()

    # ------------------------------------------------------------------ iterations

    def begin(self, owner: Epochs, skipped: int, line: str) -> LoaderIteration:
        """Start an iteration at the loader's position or, if it is nested, at the epoch's start.

        Until the first training step, each iteration also restores the saved generator states,
        unless the checkpoint was saved outside of loops.
        """
        self.attribute()
        self._is_beginning = True
        self.checkpoint.begin_iteration(owner)
        self._is_beginning = False
        start = owner.next_start
        outer = [each for each in self.open if each.owner is owner]
        if len(outer) > start.depth:  # within a loop whose epoch starts there
            stream = None if outer[-1].is_complete else outer[-1].stream
            start = StartPosition(outer[-1].start.epoch, stream=stream)
        elif len(outer) == len(self.open) and not (self.has_trained or self._is_between):
            self._restore()
        if skipped:  # by the script
            stream = start.stream if skipped == start.taken else None
            start = start._replace(taken=skipped, checksum=0, stream=stream)
        if self._was_in_last:
            self.report(_LAST_BATCH)
        self.has_begun = True
        new = LoaderIteration(owner, start, line)
        if self.is_outermost:
            owner.num_begun += 1
            new.ordinal = owner.num_begun
        self.open.append(new)
        is_within = any(not iteration.is_complete for iteration in outer)
        if owner.stream is not None and owner.next_start.stream is None and not is_within:
            owner.next_start = owner.next_start._replace(stream=owner.stream_state)  # or a peek
        return new

    def end(self, iteration: LoaderIteration) -> None:
        self.attribute()
        self.check_save()
        owner = iteration.owner
        is_evaluation = not (torch.is_grad_enabled() or iteration.has_trained)
        if is_evaluation and iteration.is_exhausted and iteration.start.taken:
            self.report(_REST)
        self.open.remove(iteration)
        iteration.end(self.open)
        self._closed.append(iteration)
        loops = [other for other in self.open if other.owner is owner and other.rounds]
        if loops and self.checkpoint.requests.get(owner) is iteration:  # it peeked in the loop
            self.checkpoint.requests[owner] = loops[-1]
        # the script has trained, or is in the body of a loop that has trained before
        is_continuing = self.has_trained or any(each.owner.has_trained for each in self.open)
        if iteration.has_trained or (iteration.rounds and not self.counts_training):
            owner.end(iteration, is_with_others=any(other.is_exhausted for other in self._closed))
        elif iteration.rounds and not owner.has_trained and is_continuing:
            owner.next_start = iteration.next_epoch

    @property
    def has_trained(self) -> bool:
        """Whether a training step has been taken since the run started or resumed.

        Also true where the script continues after a checkpoint that was saved outside of loops.
        """
        return self._continues or self.progress.num_trained != self._resumed_at

    @contextmanager
    def saving_at_end(self) -> Iterator[None]:
        """Save in a `save_state()`, which belongs at the end of a loop's or an epoch's body."""
        self.checkpoint.update_leader()
        is_in_epoch = self.earlier is not None
        self.ends_epoch = is_in_epoch and not self.open
        try:
            yield
        finally:
            self.ends_epoch = False
        self.saved_after = self.progress.num_trained if self.open or is_in_epoch else None
        trained = [each for each in self.open if each.has_trained]
        # a resumed run begins the next epoch of a complete loader; this run may first request
        # one more batch from the other loaders
        ahead = any(each.is_complete for each in trained)
        for each in trained:
            each.saved_until = each.rounds + ahead

    def check_save(self) -> None:
        """Report if the script has trained since a `save_state()` in the body that continues."""
        if self.saved_after not in (None, self.progress.num_trained):
            self.report(_NOT_AT_END)
        self.saved_after = None

    @property
    def keeps_iterators(self) -> bool:
        """Whether the script keeps an iterator that it has used for training."""
        return any(each.has_trained for each in self.open)

    @property
    def is_outermost(self) -> bool:
        """Whether a new iteration would be the outermost in the current epoch of `count_epochs`."""
        earlier = self.earlier
        return earlier is not None and all(each in earlier for each in self.open)

    def attribute(self) -> None:
        """Attribute the training steps taken since the last call of this method to iterations.

        The steps are attributed to the open iterations that have yielded a batch since then or, if
        there are none, to closed iterations, as in `batch = next(iter(loader))`. Of several
        iterations over the same loader, only the last counts.
        """
        if self._trained == self.progress.num_trained:
            return
        iterations = [each for each in (*self._closed, *self.open) if each.seen >= self._trained]
        open_ = [each for each in iterations if not each.is_over]
        if not (open_ or any(each.has_trained for each in self.open)):
            self.keeps_batches |= not iterations or max(each.rounds for each in iterations) > 1
            if self.keeps_batches and self.resumes_within:
                self.report(KEPT)
        for iteration in {each.owner: each for each in open_ or iterations}.values():
            before = iteration.owner.trained
            if before is not None and before is not iteration and before.is_dropped:
                self.report(_NOT_CONTINUED)
            iteration.owner.trained = iteration
            iteration.has_trained = iteration.owner.has_trained = True
            iteration.owner.next_start = iteration.next_epoch
            if iteration.is_over and self.counts_training:
                iteration.owner.end(iteration, is_with_others=True)
        self._trained, self.checkpoint.again = self.progress.num_trained, None
        self._closed.clear()

    # ------------------------------------------------------------------ resuming

    def resume(
        self, restore: Callable[[], object], counted: list[Any], *, has_trained: bool
    ) -> None:
        """Resume from a saved position; `restore` restores the saved generator states."""
        self.epoch, self.checkpoint.was_before_peek, self._is_between, self._was_in_last = counted
        self._continues = self._is_between
        self._restore = restore if has_trained else int
        self.checkpoint.action = self.checkpoint.again = None
        self._is_counting = False
        self._resumed_at = self._trained = self.progress.num_trained
        self._closed.clear()
        restore()

    def await_epochs(self) -> None:
        """Continue after a checkpoint outside of loops only once the script reads its epoch."""
        self._continues = self._was_in_last = False

    def begin_epochs(self) -> None:
        """Restore the saved generator states, unless the run has trained since it resumed."""
        self._counts_epochs = True
        if self._is_between and self.progress.num_trained == self._resumed_at:
            self._restore()
            self._continues = True

    def arrive(self) -> None:
        """Restore the saved generator states after the completed loops of a resumed epoch."""
        if self.progress.num_trained == self._resumed_at:
            self._restore()
            self._continues = True

    def count_epochs(self, total: int, epochs: Sequence[Epochs]) -> Iterator[int]:
        """Yield the numbers of the remaining epochs, up to `total`."""
        if self._is_counting:
            raise UsageError(
                "run.epochs() has already been called: a run can have only one loop over epochs",
                where="the script's run.epochs(...)",
                fix="use a single loop over run.epochs(n), and branch on the epoch number",
                code=Code.UNSUPPORTED,
            )
        self._is_counting = True
        self.begin_epochs()
        for number in range(self.epoch or 0, total):
            self.epoch, self.earlier = number, [*self.open]
            for loader in epochs:
                loader.num_begun = 0
            yield number
            self.attribute()
            self.check_save()
            self.epoch, self.earlier = number + 1, None
            for epoch in epochs:
                epoch.over = []
            for open_ in self.open:
                open_.ordinal = 0  # they continue in the next epoch
            if not self.keeps_iterators:
                self.checkpoint.save()

    def counted_epochs(self, epochs: Sequence[Epochs]) -> list[Any]:
        """Return the epoch of `count_epochs`, and where the checkpoint is saved.

        It may be saved before a peek, outside of loops, or in the body of a loop's last batch.
        """
        self.attribute()
        lines = self.checkpoint.lines
        has_loops = len(lines) > 1 and (self._counts_epochs or self.checkpoint.has_line_again)
        if self.epoch is None and (has_loops or sum(loader.leads for loader in epochs) > 1):
            self.report(_SEVERAL)
        if self.keeps_batches and self.has_begun:
            self.report(KEPT)
        is_between = not (self.open or self._is_beginning)
        if self.progress.num_trained == self._resumed_at:
            is_between = self._is_between
        is_last = any(each.is_complete and each.has_trained for each in self.open)
        epoch = None if self.epoch is None else self.epoch + self.ends_epoch
        return [epoch, self.checkpoint.is_before_peek, is_between, is_last]

    def report(self, text: str) -> None:
        """Log a note once, on rank 0."""
        if text not in self._reported:
            self._reported.add(text)
            if rank_and_size()[0] == 0:
                log(text)


_SEVERAL = (
    "note: the script trains in several loops over loaders, but run.epoch counts only one of them;"
    " to resume exactly, use run.epochs(n) instead of range(run.epoch, n)"
)
_NOT_AT_END = (
    "note: the script trained after save_state() in the same loop body, so a run that resumes from"
    " this checkpoint skips that part of the body. Call save_state() at the end of the body"
)
_NOT_CONTINUED = (
    "note: save_state() was called while an iterator over a loader was open, and the script then"
    " trained with a new iterator. A run that resumes from this checkpoint continues the epoch"
    " instead, so it does not resume exactly. Call checkpoint(), or delete the iterator first"
)
_REST = (
    "note: an evaluation loop yielded only the batches after the checkpoint's position in the"
    " epoch. Evaluate a loaded checkpoint with a separate loader, or save it between two epochs"
)
_LAST_BATCH = (
    "note: the checkpoint was saved in the body of a loop's last batch: the epoch is complete, so"
    " the next loop over the loader is the next epoch (loader.epoch)"
)
_IN_THREAD = (
    "note: another thread iterates over a loader, so a resumed run skips the batches that it has"
    " read ahead of the training. Iterate in the thread that trains, with num_workers > 0"
)
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
_OTHER_ORDER = (
    "note: the first {} batches of a loader differ from those before the checkpoint, so the epoch"
    " does not resume exactly: the sampler or stream has its own state. Draw from Python's, numpy's"
    " or torch's generators, use set_epoch(), or implement state_dict() for the stream"
)
TWO_ITERATORS = (
    "note: two iterators over one DataLoader take turns, but a checkpoint has one position for each"
    " DataLoader, so a run that resumes within the epoch does not resume exactly. Prepare one"
    " DataLoader for each iterator"
)
COUNTED = (
    "note: gradients were accumulated over other batches than before this run resumed: the script"
    " counts batches, and its count restarted, so the run did not resume exactly. Use"
    " accelerator.accumulate(model), or count from run.step"
)
