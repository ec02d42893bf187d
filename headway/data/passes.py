"""The passes over the loaders of a training, and which of them trained.

A pass begins at the place of its loader. Once an optimizer step is taken in it, it is an epoch, and
the place moves to the start of the next epoch. Passes without an optimizer step, such as an
evaluation or peeking at a batch, do not change the place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from headway.data.division import Offset
from headway.data.epochs import Epochs, Pass
from headway.data.order import Place
from headway.distributed.world import rank_and_size
from headway.errors import UsageError
from headway.ipc.progress import Progress
from headway.ipc.stderr import log


class DueCheckpoint:
    """A checkpoint that waits to be saved between two batches.

    After `mark`, it is saved when the leading loop requests its next batch; the leading loop is
    the first that requested a batch since the previous `mark`. After that loop's last batch it is
    saved when the next pass over its loader begins (passes under `torch.no_grad()` do not count),
    so that it includes what the script does between two epochs.
    """

    def __init__(self, report: Callable[[str], object]) -> None:
        self._report = report  # called with what does not resume exactly
        self.action: Callable[[], object] | None = None  # saves the due checkpoint, if any
        self.again: Callable[[], object] | None = None  # saves the latest again, until a step
        # whether it is saved at the start of a pass that may only peek at a batch; a run resumed
        # from there skips what follows the peek
        self.is_before_pass = False
        self.was_before_pass = False  # whether the run was resumed from such a checkpoint
        self.asked: dict[Epochs, Pass] = {}  # latest to request a batch since `mark`, in order
        self.lines: set[str] = set()  # script lines that created the iterators of leading passes
        self._leader: Pass | None = None
        self._step: list[Pass] = []  # passes that requested a batch in its latest step
        self._waiting: set[Pass] = set()  # passes that have led since the checkpoint is due

    def mark(self, action: Callable[[], object]) -> bool:
        """Mark a checkpoint as due; return whether a loop can save it."""
        is_asked = bool(self.asked)
        self.note_leader()
        leader, is_due = self._leader, self.action is not None
        self.action = None
        if leader is None or leader.is_over:
            return False
        if not is_asked and leader.rounds < 2:  # several steps on one batch, and no loop yet
            self._report(_KEPT)
            return False
        self._waiting = {leader, *(self._waiting if is_due else ())}
        self.action = action
        return True

    def note_leader(self) -> None:
        """Update the leading loop: over the leading loader, or the first that asked."""
        asked = [pass_ for pass_ in self.asked.values() if pass_.rounds and not pass_.is_over]
        self.asked.clear()
        if not asked:
            return
        before = self._leader
        same = [pass_ for pass_ in asked if before is not None and pass_.owner is before.owner]
        self._leader, self._step = (same or asked)[0], asked
        if any(pass_.has_led and pass_ not in same for pass_ in asked):
            self._report(_TURNS)
        if self._leader is before or len(asked) == 1:  # not just an iterator that the script keeps
            self._leader.has_led = self._leader.owner.leads = True
            self.lines.add(self._leader.line)

    def ask(self, pass_: Pass) -> None:
        """Save the due checkpoint if it waits for this pass, which requests a batch."""
        steps = (pass_, *self._step)  # a pass may be exhausted, such as the shorter in a zip
        if pass_ in self._waiting and all(each.is_over or not each.is_complete for each in steps):
            self.take()

    def begin_pass(self, owner: Epochs, *, is_in_epoch: bool) -> None:
        """Save the checkpoint that waits for the next pass over a loader; again after a peek.

        A run that resumes in an epoch of `run.epochs` always executes what follows a peek.
        """
        is_over = self._leader is not None and self._leader.is_over and torch.is_grad_enabled()
        if not is_over or all(pass_.owner is not owner for pass_ in self._waiting):
            return
        if (action := self.action) is not None:
            self.is_before_pass = not is_in_epoch
            self.take()
            self.is_before_pass, self.again = False, action
        elif self.again is not None:
            if self.was_before_pass:
                self._report(_LOOKED)
            self.again()

    def take(self) -> None:
        """Save the checkpoint if it is due."""
        action, self.action = self.action, None
        if action is not None:
            action()


class LoaderSet:
    """Shared state of the loaders of a training."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.counts_training = False  # whether there is an optimizer; else each pass is an epoch
        self.has_begun = False  # whether a pass over a prepared loader has begun
        self.open: list[Pass] = []
        self.epoch: int | None = None  # of `count_epochs`, if the script uses it
        self.keeps_batches = False  # whether it has trained on batches that the script kept
        self.checkpoint = DueCheckpoint(self.report)
        self._earlier: list[Pass] | None = None  # open when the epoch of `count_epochs` began
        self._is_counting = False  # whether the script counts epochs
        self._closed: list[Pass] = []  # passes closed since the last training step
        self._trained = progress.num_trained  # training count already attributed to passes
        self._restore: Callable[[], object] = int  # restores the saved generator states
        self._resumed_at = progress.num_trained
        self._reported: set[str] = set()

    # ------------------------------------------------------------------ passes

    def begin(self, owner: Epochs, skipped: Offset | None, line: str) -> Pass:
        """Begin a pass at the loader's place; within a loop over it, at that epoch's start.

        Until the first training step, each pass also restores the saved generator states.
        """
        self.attribute()
        self.checkpoint.begin_pass(owner, is_in_epoch=self.epoch is not None)
        place = owner.place
        outer = [pass_ for pass_ in self.open if pass_.owner is owner]
        if len(outer) > place.depth:  # within the loop whose epoch began at the place
            place = Place(outer[-1].place.epoch)
        elif len(outer) == len(self.open) and not self.has_trained:
            self._restore()
        if skipped is not None:  # the script skips batches
            stream = place.stream if skipped == place.taken else None
            place = place._replace(taken=skipped, checksum=0, stream=stream)
        if owner.draws.seed is None:
            place = place._replace(is_new=True)
        self.has_begun = True
        new = Pass(owner, place, len(outer), line)
        if self.is_outermost:
            owner.num_begun += 1
            new.ordinal = owner.num_begun
        self.open.append(new)
        is_within = any(not pass_.is_complete for pass_ in outer)
        if owner.stream is not None and owner.place.stream is None and not is_within:
            owner.place = owner.place._replace(stream=owner.stream_state)  # after a peek, too
        return new

    def end(self, pass_: Pass) -> None:
        self.attribute()
        owner, pass_.is_over = pass_.owner, True
        self.open.remove(pass_)
        self._closed.append(pass_)
        loops = [other for other in self.open if other.owner is owner and other.has_trained]
        if loops and self.checkpoint.asked.get(owner) is pass_:  # peeked at a batch within the loop
            self.checkpoint.asked[owner] = loops[-1]
        if pass_.has_trained or (pass_.rounds and not self.counts_training):
            owner.end(pass_, is_with_others=any(other.is_exhausted for other in self._closed))
        elif pass_.is_exhausted and self.has_trained and not owner.has_trained:
            owner.place = pass_.following

    @property
    def has_trained(self) -> bool:
        """Whether a training step was taken since the run was started or resumed."""
        return self.progress.num_trained != self._resumed_at

    @property
    def is_outermost(self) -> bool:
        """Whether a pass that begins now is not nested in another of this `count_epochs` epoch."""
        earlier = self._earlier
        return earlier is not None and all(pass_ in earlier for pass_ in self.open)

    def attribute(self) -> None:
        """Attribute training steps since the last call to passes.

        They belong to the open passes that yielded a batch since then, otherwise to the closed
        passes, as in `batch = next(iter(loader))`. With several passes over a loader, to the last.
        """
        if self._trained == self.progress.num_trained:
            return
        passes = [pass_ for pass_ in (*self._closed, *self.open) if pass_.seen >= self._trained]
        open_ = [pass_ for pass_ in passes if not pass_.is_over]
        if not (open_ or any(pass_.has_trained for pass_ in self.open)):
            self.keeps_batches |= not passes or max(pass_.rounds for pass_ in passes) > 1
        for pass_ in {pass_.owner: pass_ for pass_ in open_ or passes}.values():
            pass_.has_trained = pass_.owner.has_trained = True
            pass_.owner.place = pass_.following
            if pass_.is_over and self.counts_training:
                pass_.owner.end(pass_, is_with_others=True)
        self._trained, self.checkpoint.again = self.progress.num_trained, None
        self._closed.clear()

    # ------------------------------------------------------------------ resuming

    def resume(
        self, restore: Callable[[], object], counted: list[Any], *, has_trained: bool
    ) -> None:
        """Resume from a saved position; `restore` restores the saved generator states."""
        self.epoch, self.checkpoint.was_before_pass = counted
        self._restore = restore if has_trained else int
        self.checkpoint.action = self.checkpoint.again = None
        self._is_counting = False
        self._resumed_at = self._trained = self.progress.num_trained
        self._closed.clear()
        restore()

    def count_epochs(self, total: int, epochs: Sequence[Epochs]) -> Iterator[int]:
        """Yield the numbers of the epochs to train."""
        if self._is_counting:
            raise UsageError(
                "run.epochs() was called before: a run can have only one loop over its epochs",
                where="the script's run.epochs(...)",
                fix="use a single loop over run.epochs(n), and branch on the epoch number",
            )
        self._is_counting = True
        for number in range(self.epoch or 0, total):
            self.epoch, self._earlier = number, [*self.open]
            for loader in epochs:
                loader.num_begun = 0
            yield number
            self.attribute()
            self.epoch, self._earlier = number + 1, None
            for epoch in epochs:
                epoch.over = []
            for open_ in self.open:
                open_.ordinal = 0  # they continue in the next epoch

    def counted_epochs(self, epochs: Sequence[Epochs]) -> list[Any]:
        """Return the epoch of `count_epochs`, and whether the checkpoint precedes a peek."""
        self.attribute()
        num_leaders = max(sum(loader.leads for loader in epochs), len(self.checkpoint.lines))
        if self.epoch is None and num_leaders > 1:
            self.report(_SEVERAL)
        if self.keeps_batches and self.has_begun:
            self.report(_KEPT)
        return [self.epoch, self.checkpoint.is_before_pass]

    def report(self, text: str) -> None:
        """Log once, on rank 0, what does not resume exactly."""
        if text not in self._reported:
            self._reported.add(text)
            if rank_and_size()[0] == 0:
                log(text)


_SEVERAL = (
    "note: several loops over loaders train, and run.epoch counts only one of them: to resume"
    " exactly, use run.epochs(n) instead of range(run.epoch, n)"
)
_KEPT = (
    "note: the script trained between two passes over loaders on batches that it keeps"
    " (itertools.cycle, a list): a resumed run keeps different batches, which is not exact. Loop"
    " over the loader itself"
)
_TURNS = (
    "note: loops over several loaders take turns: one is open while another yields the batches of a"
    " step. If they are nested or chosen at random, the run does not resume exactly. Use a batch of"
    " each loader in each step, or loop over the loaders one after another under run.epochs(n)"
)
_LOOKED = (
    "note: this run was resumed from a checkpoint before peeking at a loader between two loops, and"
    " skipped what the script does after the peek. Peek at the loader under torch.no_grad()"
)
