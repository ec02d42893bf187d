"""The passes over the loaders of a training, and what was trained in them.

A pass begins at the place of its loader. Once something was trained in it, it is an epoch, and the
place is the beginning of the next one. A pass in which nothing was trained leaves the place as it
is: an evaluation, or a look at a batch, changes nothing.
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
    """A checkpoint that waits for a place between two batches.

    `mark` notes that it is due, and it is taken when the loop that leads asks for its next batch:
    the first one that has asked since the last `mark`. After that loop's last batch it is taken
    when its loader's next pass begins, but for those under `torch.no_grad()`: what the script does
    between two epochs is part of it.
    """

    def __init__(self, report: Callable[[str], object]) -> None:
        self._report = report  # reports what does not resume exactly
        self.action: Callable[[], object] | None = None  # takes it, if one is due
        self.again: Callable[[], object] | None = None  # takes the latest one, until a training
        # whether it is taken as a pass begins, which may be a look at a batch; a run that resumes
        # from there does not do what follows the look
        self.is_before_pass = False
        self.was_before_pass = False  # whether the run was resumed from such a one
        self.asked: dict[Epochs, Pass] = {}  # the latest passes that asked since `mark`, in order
        self.lines: set[str] = set()  # of the script: iterators of passes that have led a step
        self._leader: Pass | None = None
        self._step: list[Pass] = []  # those that have asked in its latest step
        self._waiting: set[Pass] = set()  # those that have led since it is due

    def mark(self, action: Callable[[], object]) -> bool:
        """Note that a checkpoint is due; return whether there is a loop that could take it."""
        is_asked = bool(self.asked)
        self.note_leader()
        leader, is_due = self._leader, self.action is not None
        self.action = None
        if leader is None or leader.is_over:
            return False
        if not is_asked and leader.rounds < 2:  # several steps with one batch, and no loop so far
            self._report(_KEPT)
            return False
        self._waiting = {leader, *(self._waiting if is_due else ())}
        self.action = action
        return True

    def note_leader(self) -> None:
        """Note which loop was the first to ask; one over the loader that has led leads on."""
        asked = [pass_ for pass_ in self.asked.values() if pass_.rounds and not pass_.is_over]
        self.asked.clear()
        if not asked:
            return
        before = self._leader
        same = [pass_ for pass_ in asked if before is not None and pass_.owner is before.owner]
        self._leader, self._step = (same or asked)[0], asked
        if any(pass_.has_led and pass_ not in same for pass_ in asked):
            self._report(_TURNS)
        if self._leader is before or len(asked) == 1:  # and not only an iterator that is kept
            self._leader.has_led = self._leader.owner.leads = True
            self.lines.add(self._leader.line)

    def ask(self, pass_: Pass) -> None:
        """Take it if it waits for this pass, which wants a batch."""
        steps = (pass_, *self._step)  # of which one may be at its end, as the shorter one of a zip
        if pass_ in self._waiting and all(each.is_over or not each.is_complete for each in steps):
            self.take()

    def begin_pass(self, owner: Epochs, *, is_in_epoch: bool) -> None:
        """Take it if it waits for the next pass over a loader; after a look at it again.

        A run that resumes in an epoch of `run.epochs` does what follows a look in any case.
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
        """Take it, if it is due."""
        action, self.action = self.action, None
        if action is not None:
            action()


class LoaderSet:
    """What the loaders of one training have in common."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.counts_training = False  # is there an optimizer? without one each pass is an epoch
        self.has_begun = False  # whether a pass over a prepared loader has begun
        self.open: list[Pass] = []
        self.epoch: int | None = None  # that of `count_epochs`, if the script uses it
        self.keeps_batches = False  # whether it has trained with batches that it has kept
        self.checkpoint = DueCheckpoint(self.report)
        self._earlier: list[Pass] | None = None  # open ones, as the epoch of `count_epochs` began
        self._is_counting = False  # whether the script counts epochs
        self._closed: list[Pass] = []  # since something was trained
        self._trained = progress.num_trained  # what is attributed to passes
        self._restore: Callable[[], object] = int  # the generators, as they were saved
        self._resumed_at = progress.num_trained
        self._reported: set[str] = set()

    # ------------------------------------------------------------------ where a pass begins

    def begin(self, owner: Epochs, skipped: Offset | None, line: str) -> Pass:
        """Begin a pass over a loader at its place; in a loop over it, where that epoch began.

        Until something is trained, each begins with the generators that were saved, too.
        """
        self.attribute()
        self.checkpoint.begin_pass(owner, is_in_epoch=self.epoch is not None)
        place = owner.place
        outer = [pass_ for pass_ in self.open if pass_.owner is owner]
        if len(outer) > place.depth:  # within the loop whose epoch began at the place
            place = Place(outer[-1].place.epoch)
        elif len(outer) == len(self.open) and not self.has_trained:
            self._restore()
        if skipped is not None:  # which the script leaves out
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
            owner.place = owner.place._replace(stream=owner.stream_state)  # after a look, too
        return new

    def end(self, pass_: Pass) -> None:
        """End a pass that gives no more."""
        self.attribute()
        owner, pass_.is_over = pass_.owner, True
        self.open.remove(pass_)
        self._closed.append(pass_)
        loops = [other for other in self.open if other.owner is owner and other.has_trained]
        if loops and self.checkpoint.asked.get(owner) is pass_:  # a look within the loop
            self.checkpoint.asked[owner] = loops[-1]
        if pass_.has_trained or (pass_.rounds and not self.counts_training):
            owner.end(pass_, is_with_others=any(other.is_exhausted for other in self._closed))
        elif pass_.is_exhausted and self.has_trained and not owner.has_trained:
            owner.place = pass_.following

    @property
    def has_trained(self) -> bool:
        """Whether something was trained since the run was started or resumed."""
        return self.progress.num_trained != self._resumed_at

    @property
    def is_outermost(self) -> bool:
        """Whether a pass that begins now is in no other of the epoch of `count_epochs`."""
        earlier = self._earlier
        return earlier is not None and all(pass_ in earlier for pass_ in self.open)

    def attribute(self) -> None:
        """Note in which passes was trained what was trained since the last call.

        It belongs to the open passes that have given a batch since then, or if there are none, to
        the closed ones: `batch = next(iter(loader))`. Of several over one loader it is the last.
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

    # ------------------------------------------------------------------ a resumed run

    def resume(
        self, restore: Callable[[], object], counted: list[Any], *, has_trained: bool
    ) -> None:
        """Resume where a run was saved; `restore` gives generators the states that they had."""
        self.epoch, self.checkpoint.was_before_pass = counted
        self._restore = restore if has_trained else int
        self.checkpoint.action = self.checkpoint.again = None
        self._is_counting = False
        self._resumed_at = self._trained = self.progress.num_trained
        self._closed.clear()
        restore()

    def count_epochs(self, total: int, epochs: Sequence[Epochs]) -> Iterator[int]:
        """Yield the numbers of the epochs that are to be trained."""
        if self._is_counting:
            raise UsageError(
                "run.epochs() counts all epochs of a run, and was called before",
                where="the script's run.epochs(...)",
                fix="write one loop over run.epochs(n), and choose by the number of the epoch",
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
                open_.ordinal = 0  # which are not over in the next epoch

    def counted_epochs(self, epochs: Sequence[Epochs]) -> list[Any]:
        """Return the epoch of `count_epochs`, and whether a pass begins that may be a look."""
        self.attribute()
        num_leaders = max(sum(loader.leads for loader in epochs), len(self.checkpoint.lines))
        if self.epoch is None and num_leaders > 1:
            self.report(_SEVERAL)
        if self.keeps_batches and self.has_begun:
            self.report(_KEPT)
        return [self.epoch, self.checkpoint.is_before_pass]

    def report(self, text: str) -> None:
        """Report once, on rank 0, what cannot resume exactly."""
        if text not in self._reported:
            self._reported.add(text)
            if rank_and_size()[0] == 0:
                log(text)


_SEVERAL = (
    "note: several loops over loaders train, and run.epoch is that of one of them: for an exact"
    " resumption write run.epochs(n) in place of range(run.epoch, n)"
)
_KEPT = (
    "note: something was trained between two passes over loaders, with batches that the script has"
    " kept (itertools.cycle, a list): a run that resumes keeps others, and not exactly these. Loop"
    " over the loader itself"
)
_TURNS = (
    "note: loops over several loaders take turns: one is open while another gives the batches of a"
    " step. Where they are nested, or chosen at random, the run does not resume exactly. Ask each"
    " loader in each step, or loop over one after the other under run.epochs(n)"
)
_LOOKED = (
    "note: this run was resumed from a checkpoint before a look at a loader, between two loops over"
    " it, without what the script does after the look. Look at it under torch.no_grad()"
)
