"""The passes over the loaders of a training, and where a checkpoint that is due is taken.

A pass begins at the place of its loader. Once something was trained in it, it is an epoch, and the
place is the beginning of the next one. A pass in which nothing was trained leaves the place as it
is: an evaluation, or a look at a batch, changes nothing.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from headway.contract.notes import say
from headway.contract.progress import Progress
from headway.data.generators import snapshot
from headway.data.order import Draws, Place
from headway.data.rounds import Offset
from headway.distributed.world import rank_and_size
from headway.errors import UsageError


class Loop(NamedTuple):
    """Where the script has made the iterator of a pass."""

    line: str
    is_inside: bool = False  # in an epoch of `run.epochs`


class Pass:
    """One pass over a loader, from its place on.

    Attributes:
        number: how many passes over loaders of the training have begun before it.
        depth: how many other passes over its loader were open when it began.
        made: where its iterator was made.
        ordinal: its number among the loader's passes in an epoch of `run.epochs`; 0 in a loop.
        left_out: what is read and dropped; nothing, if the data set goes on by its state.
        rounds: global batches that the script was given; `samples` are the samples in them.
        is_complete: whether the last one was given.
        is_exhausted: whether the script has asked for a batch after that.
        has_trained: whether something was trained in it.
        seen: how much had been trained when it gave its latest batch.
        sums: numbers for the batches up to each, of a sampler that is not one of torch's.
        checksum: such a number for the batches of a stream without state.
        stream: the state of the data set after the batches that were given.
        generators: the states of the loader's own ones as it began, where what was given is read
            again by a run that resumes.
    """

    def __init__(self, owner: Epochs, place: Place, number: int, depth: int) -> None:
        self.owner, self.place, self.number, self.depth = owner, place, number, depth
        self.ordinal, self.made = 0, Loop("")
        self.left_out = place.taken
        self.rounds = self.samples = self.checksum = 0
        self.is_complete = self.is_exhausted = self.has_trained = self.is_over = False
        self.seen = -1
        self.sums = array("L")
        self.stream: Any = None
        self.generators: list[Any] | None = None

    @property
    def following(self) -> Place:
        """The beginning of the next epoch."""
        return Place(self.place.epoch + 1, depth=self.depth)


class Run:
    """What the loaders of one training have in common.

    A checkpoint lies between two batches: `mark` notes that one is due, and it is taken when the
    loop that leads asks for its next batch: the first one that has asked since the last `mark`.
    If loops take turns, so that another one leads before it was taken, any of them takes it.
    After that loop's last batch it is taken when its loader's next pass begins, but for those under
    `torch.no_grad()`, so that what the script does between two epochs is part of it.

    Attributes:
        counts_training: whether the training has an optimizer; without one, every pass over a
            loader is an epoch.
        epoch: that of `count_epochs`; None if the script does not use it.
        keeps_batches: whether something was trained in no pass, but with batches of earlier ones.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.counts_training = False
        self.open: list[Pass] = []
        self.epoch: int | None = None
        self.keeps_batches = False
        self.asked: dict[Pass, None] = {}  # those that have asked since `mark`, the first first
        self.due: Callable[[], object] | None = None
        self.leaders: set[Epochs] = set()  # those whose passes have led a step
        self._leader: Pass | None = None
        self._is_between_epochs = False  # of `count_epochs`, where the run resumes
        self._resumed_over: list[list[int]] | None = None  # until `count_epochs` is called
        self._together: list[Pass] = []  # those that have asked with it
        self._take_turns = False
        self._is_counting = False  # whether the script counts epochs
        self._noted_at = self._marked_at = 0
        self._taken_before = 0  # the number of the pass at whose beginning the latest was taken
        self._taken: Callable[[], object] | None = None  # how, to take it again after a look
        self._is_early = self._was_early = False  # the checkpoint, and the resumed one
        self._looked_at = -1  # how much had been trained when that pass was over, and was a look
        self.is_in_epoch = False  # of `count_epochs`
        self._kept: dict[Pass, int] = {}  # those that were open at an epoch's end, and their rounds
        self._waiting: list[Pass] = []  # those that were open when the checkpoint was due
        self._states: Any = None  # of the generators then
        self._num_begun = 0
        self._closed: list[Pass] = []  # since something was trained
        self._trained = progress.num_trained  # what is attributed to passes
        self._restore: Callable[[], object] = int  # the generators, as they were saved
        self._resumed_at = progress.num_trained
        self._is_told: set[str] = set()

    # ------------------------------------------------------------------ where a pass begins

    def begin(self, owner: Epochs, skipped: Offset | None, made: Loop) -> Pass:
        """Begin a pass over a loader at its place; in a loop over it, where that epoch began.

        Until something is trained, each begins with the generators that were saved, too. `skipped`
        is what the script leaves out. One that is made in an epoch of `count_epochs` does not
        resume one that the epoch before has left open.
        """
        leader = self._leader
        is_next = leader is not None and leader.is_over and leader.owner is owner
        take = self._waits
        if is_next and take is not None and torch.is_grad_enabled():
            self._is_early = take is self.due
            self.take()
            self._taken, self._taken_before = take, self._num_begun + 1
            self._is_early = False
        self.attribute()
        if made.is_inside and owner.is_left and owner.place.taken.batches:
            owner.place = Place(owner.place.epoch + 1, depth=owner.place.depth)
        place = owner.place
        outer = [one for one in self.open if one.owner is owner]
        if len(outer) > place.depth:  # within the loop whose epoch began at the place
            place = Place(outer[-1].place.epoch)
        elif len(outer) == len(self.open) and not self.has_trained:
            self._restore()
        if skipped is not None:
            stream = place.stream if skipped == place.taken else None
            place = place._replace(taken=skipped, checksum=0, stream=stream)
        if not owner.draws.seeds:
            place = place._replace(is_new=True)
        self._num_begun += 1
        new = Pass(owner, place, self._num_begun, len(outer))
        new.made = made
        if not self.open:
            owner.num_begun += 1
            new.ordinal = owner.num_begun
        self.open.append(new)
        is_within = any(not one.is_complete for one in outer)
        if owner.stream is not None and owner.place.stream is None and not is_within:
            owner.place = owner.place._replace(stream=owner.stream_state)  # after a look, too
        return new

    def end(self, one: Pass) -> None:
        """End a pass that gives no more."""
        self.attribute()
        owner, one.is_over = one.owner, True
        self.open.remove(one)
        self.asked.pop(one, None)
        self._closed.append(one)
        if one.number == self._taken_before and not one.has_trained:
            self._looked_at = self.progress.num_trained
            if self._was_early:
                self.tell(_LOOKED)
        if one.has_trained or (one.rounds and not self.counts_training):
            owner.end(one, is_with_others=any(other.is_exhausted for other in self._closed))
        elif one.is_exhausted and self.has_trained and not owner.has_trained:
            owner.place = one.following

    @property
    def has_begun(self) -> bool:
        """Whether a pass over a prepared loader has begun."""
        return self._num_begun > 0

    @property
    def has_trained(self) -> bool:
        """Whether something was trained since the run was started or resumed."""
        return self.progress.num_trained != self._resumed_at

    def attribute(self) -> None:
        """Note in which passes was trained what was trained since the last call.

        It belongs to the open passes that have given a batch since then, or if there are none, to
        the closed ones: `batch = next(iter(loader))`. Of several over one loader it is the last.
        """
        if self._trained == self.progress.num_trained:
            return
        passes = [one for one in (*self._closed, *self.open) if one.seen >= self._trained]
        open_ = [one for one in passes if not one.is_over]
        if not (open_ or any(one.has_trained for one in self.open)):
            self.keeps_batches |= not passes or max(one.rounds for one in passes) > 1
        passes = open_ or passes
        for one in {one.owner: one for one in passes}.values():
            one.has_trained = one.owner.has_trained = True
            one.owner.is_outside |= not one.made.is_inside
            one.owner.lines.add(one.made.line)
            one.owner.place = one.following
            if one.is_over and self.counts_training:
                one.owner.end(one, is_with_others=True)
        self._trained, self._taken = self.progress.num_trained, None
        self._closed.clear()

    # ------------------------------------------------------------------ a resumed run

    def resume(self, restore: Callable[[], object], *, has_trained: bool) -> None:
        """Resume where a run was saved; `restore` gives generators the states that they had."""
        self._restore, self.due = restore if has_trained else int, None
        self._looked_at = -1
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
            self.epoch, over = number, self._resumed_over or [[] for _ in epochs]
            for one, ordinals in zip(epochs, over, strict=True):
                one.num_begun, one.over, one.empty = 0, [*ordinals], [*ordinals]
                one.is_left = self._is_between_epochs
            self._resumed_over = None
            if self._is_between_epochs:  # the code before the first loop is run for the first time
                self._restore()
                self._restore, self._is_between_epochs = int, False
            self.is_in_epoch = True
            yield number
            self.attribute()
            self.is_in_epoch, self.epoch = False, number + 1
            if any(one.rounds > rounds for one, rounds in self._kept.items()):
                self.tell(_CONTINUED)
            self._kept = {one: one.rounds for one in self.open if not one.owner.is_outside}
            for one in epochs:
                one.num_begun, one.over = 0, []
            for open_ in self.open:
                open_.ordinal = 0  # which are not over in the next epoch
            self.take()

    def counted_epochs(self, epochs: Sequence[Epochs]) -> list[Any]:
        """Return the epoch of `count_epochs`, and which passes of each loader are over in it."""
        self.attribute()
        led = [one in self.leaders for one in epochs]
        if self.epoch is None and (sum(led) > 1 or any(len(one.lines) > 1 for one in epochs)):
            self.tell(_SEVERAL)
        if self.keeps_batches and self.has_begun:
            self.tell(_KEPT)
        if self._resumed_over is not None:  # the run has not come to its loop over epochs
            return [self.epoch, self._resumed_over, led, self._is_between_epochs, False]
        is_within = self.epoch is None or any(one.num_begun or one.over for one in epochs)
        return [self.epoch, [[*one.over] for one in epochs], led, not is_within, self._is_early]

    def resume_epochs(self, saved: list[Any], epochs: Sequence[Epochs]) -> None:
        """Resume in the epoch of `counted_epochs`: its passes that are over are empty."""
        self.epoch, over, led, self._is_between_epochs, self._was_early = saved
        self.leaders = {one for one, leads in zip(epochs, led, strict=True) if leads}
        self._resumed_over = None if self.epoch is None else over

    # ------------------------------------------------------------------ checkpoints

    def mark(self, take: Callable[[], object]) -> bool:
        """Note that a checkpoint is due, in place of one that waits.

        False: there is no loop that could take it, and the caller has to at once.
        """
        before = self._leader
        self.note_leader()
        leader, trained = self._leader, self.progress.num_trained
        # a loop that has given one batch, with which several steps were trained, may not ask again
        is_kept = leader is not None and leader.rounds < 2 and trained != self._noted_at
        if leader is None or leader.is_over or is_kept:
            self.due = None
            return False
        self._take_turns = self.due is not None and leader is not before
        self._waiting, self.due, self._marked_at = [*self.open], take, trained
        if len(self.open) > 1:
            self._states = snapshot()
        return True

    def note_leader(self) -> None:
        """Note which loop was the first to ask since the last time."""
        loops = [one for one in self.asked if one.rounds]
        self.asked.clear()
        if loops:
            self._leader, self._together = loops[0], loops
            self._noted_at = self.progress.num_trained
            self.leaders.add(loops[0].owner)

    def ask(self, one: Pass) -> None:
        """Take the checkpoint that is due, if it waits for this pass, which wants a batch.

        Not while a loop that the leading one goes with is at its end, as the shorter one of a zip.
        """
        leader = self._leader
        if leader is None or (one is not leader and one not in self._waiting):
            return
        others = self._waiting if self._take_turns else self._together
        is_at_end = any(each.is_complete and not each.is_over for each in others)
        if one is not leader and self._has_drawn:
            self.tell(_CHOSEN)
        if one is leader or self._take_turns:
            if not is_at_end:
                self.take()
            elif one is leader:
                self._marked_at = -1  # the other loops now ask for the next step
        elif leader.is_over:
            self.take()

    @property
    def _has_drawn(self) -> bool:
        """Whether random numbers were drawn since the checkpoint was due, and nothing trained."""
        return self.progress.num_trained == self._marked_at and snapshot() != self._states

    @property
    def _waits(self) -> Callable[[], object] | None:
        """What takes the checkpoint that is due; or the latest again, if it came before a look."""
        is_again = self._looked_at == self.progress.num_trained
        return self._taken if self.due is None and is_again else self.due

    def take(self) -> None:
        """Take the checkpoint that is due, if any."""
        take, self.due, self._looked_at = self._waits, None, -1
        if take is not None:
            take()

    def tell(self, text: str) -> None:
        """Report once, on rank 0, what cannot resume exactly."""
        if text not in self._is_told:
            self._is_told.add(text)
            if rank_and_size()[0] == 0:
                say(text)


class Epochs:
    """The epochs of a loader.

    Attributes:
        num_batches: batches of the script's loader in one of all ranks.
        stream: a data set with a state of its own, or None.
        place: where its next pass begins.
        has_trained: whether something was trained in a pass, in earlier runs as well.
        num_begun: how many passes have begun in the epoch of `run.epochs`, outside of loops.
        over: which of these are epochs that are over; `empty` were so before the run was resumed.
        is_left: whether the run was saved between two epochs of `run.epochs`.
        lines: of the script, with loops in which something was trained.
        is_outside: whether something was trained in a pass that was made outside of these.
    """

    def __init__(self, run: Run, draws: Draws, num_batches: int) -> None:
        self.run, self.draws, self.num_batches = run, draws, num_batches
        self.stream: Any = None
        self.place = Place()
        self.has_trained = False
        self.num_begun = 0
        self.over: list[int] = []
        self.empty: list[int] = []
        self.is_left = self.is_outside = False
        self.lines: set[str] = set()
        self._samples = 0  # in epochs that are over
        self._is_left_within = False  # whether the latest epoch was left before its end
        self._left_after = 0  # batches, where the latest epoch that was left early was left
        self._num_compared = 2  # epochs that were left early, since a run resumed within one

    def end(self, one: Pass, *, is_with_others: bool) -> None:
        """Count a pass that is an epoch and gives no more."""
        self.place, self._is_left_within = one.following, not one.is_complete
        self._samples += one.samples
        if one.ordinal and self.run.epoch is not None:
            self.over.append(one.ordinal)
        taken = one.place.taken.batches
        if (taken and self._left_after) or not (one.is_exhausted or is_with_others):
            self._note_left(taken + one.rounds * self.num_batches)

    def _note_left(self, batches: int) -> None:
        """Report a script that counts batches by itself: a resumed run leaves elsewhere."""
        if self._num_compared < 2 and self._left_after not in (0, batches):
            self.run.tell(_LEFT)
        self._num_compared += 1
        self._left_after = batches

    @property
    def stream_state(self) -> Any:
        """The state with which the stream begins an epoch; None if it makes its own."""
        return None if self._is_left_within else copy.deepcopy(self.stream.state_dict())

    def skip_empty(self) -> bool:
        """Return whether the next pass was over before the run was resumed, and begin it if so."""
        if self.run.open or self.num_begun + 1 not in self.empty:
            return False
        self.num_begun += 1
        return True

    def set(self, number: int) -> None:
        """Number the next pass; where a resumed run has passes that are empty, it is numbered."""
        is_resumed = bool(self.empty) and not self.run.has_trained
        if self.place.epoch != number and not is_resumed:
            self.place = Place(number)

    def resume(self, place: Place, position: dict[str, Any]) -> None:
        """Stand where a run was saved."""
        self.place, self._samples = place, position["samples"]
        self.has_trained, self._left_after = position["has_trained"], position["left_after"]
        self._num_compared = 0 if place.taken.batches else 2

    @property
    def current(self) -> Pass | None:
        """The epoch that is under way."""
        self.run.attribute()
        is_any = not self.run.counts_training
        passes = (one for one in reversed(self.run.open) if one.owner is self)
        return next((one for one in passes if one.has_trained or is_any), None)

    @property
    def number(self) -> int:
        """The number of the epoch that is under way and not complete, or else of the next one."""
        current = self.current
        is_within = current is not None and not current.is_complete
        return current.place.epoch if current is not None and is_within else self._next.epoch

    @property
    def _next(self) -> Place:
        current = self.current
        return self.place if current is None else current.following

    @property
    def samples(self) -> int:
        """How many samples were given in epochs."""
        current = self.current
        return self._samples + (0 if current is None else current.samples)

    def stand(self, taken: Callable[[Pass], Offset]) -> dict[str, Any]:
        """Return where the next pass of a run that resumes from here begins."""
        current, place = self.current, self._next
        if current is not None and not current.is_complete:
            place, given = current.place, taken(current)
            sums = [0, *current.sums[given.batches - 1 : given.batches]]
            first = self.draws.first if place.is_new else place.first
            checksum = sums[-1] or current.checksum
            place = Place(place.epoch, given, checksum, first, current.stream, depth=current.depth)
        elif self.stream is not None and place.stream is None:
            place = place._replace(stream=self.stream_state)
        return {
            "place": [*place._replace(taken=[*place.taken])],  # type: ignore[arg-type]
            "samples": self.samples,
            "has_trained": self.has_trained,
            "left_after": self._left_after,
        }


_SEVERAL = (
    "note: several loops over loaders train, and run.epoch is that of one of them: for an exact"
    " resumption write run.epochs(n) in place of range(run.epoch, n)"
)
_KEPT = (
    "note: something was trained between two passes over loaders, with batches that the script has"
    " kept (itertools.cycle, a list): a run that resumes keeps others, and not exactly these. Loop"
    " over the loader itself"
)
_CHOSEN = (
    "note: several loops over loaders are open, and random numbers are drawn before one of them is"
    " asked for a batch: if they choose the loader, the run does not resume exactly. Choose it by"
    " the number of the step"
)
_CONTINUED = (
    "note: an iterator over a loader was made in an epoch of run.epochs() and used in a later one,"
    " which does not resume exactly. Make it before the loop over epochs"
)
_LEFT = (
    "note: a loop over a loader was left elsewhere than the one before it: if the script counts"
    " batches, its count began anew where this run resumed, which is not exact. Count optimizer"
    " steps from run.step"
)
_LOOKED = (
    "note: this run was resumed from a checkpoint before a look at a loader, between two loops over"
    " it, without what the script does after the look. Look at it under torch.no_grad()"
)
