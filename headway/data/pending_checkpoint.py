"""Saves a checkpoint that is due between two batches."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from headway.data.loader_set import Epochs, LoaderIteration, LoaderSet


class PendingCheckpoint:
    """A checkpoint that is due and will be saved between two batches.

    After `schedule`, the checkpoint is saved when the leading loop requests its next batch. The
    leading loop is the first that has requested a batch since the previous `schedule`. After its
    last batch, the checkpoint is saved when the next iteration over the same loader starts, so that
    it includes the script's changes between two epochs. Iterations under `torch.no_grad()` do not
    save it.

    Outside of a loop, or of a loop in another thread, a checkpoint is saved at once. In an epoch of
    `run.epochs`, it is saved after a loop's last batch or outside of a loop when the next loop
    begins, or at the end of the epoch's body, which a run that resumes from there does not execute
    again. If the script keeps an iterator that it trains with, the checkpoint is in both cases
    saved when the next loop begins, because the script may replace the iterator before. The last
    checkpoint of a run that stops is not delayed by a loop.
    """

    def __init__(self, run: LoaderSet) -> None:
        self._run = run
        self.action: Callable[[], object] | None = None  # saves the pending checkpoint, if any
        self.again: Callable[[], object] | None = None  # saves the latest again; None after a step
        # whether the checkpoint is saved at the start of an iteration that may only peek at a
        # batch; a run resumed from there skips the code after the peek
        self.is_before_peek = False
        self.was_before_peek = False  # whether the run was resumed from such a checkpoint
        self.requests: dict[Epochs, LoaderIteration] = {}  # since `schedule`, in order
        self.lines: list[str] = []  # script lines that created the leading iterators, in order
        self._leader: LoaderIteration | None = None
        self._is_last = False  # whether the run stops after the pending checkpoint
        self._trained_at = 0  # training count at the first `checkpoint()` after a request
        self._step: list[LoaderIteration] = []  # that requested a batch in its latest step
        self._waiting: set[LoaderIteration] = set()  # that have led since the checkpoint became due

    def schedule(self, action: Callable[[], object], *, is_last: bool = False) -> bool:
        """Schedule a checkpoint; return False if it must be saved at once."""
        self._is_last = is_last
        has_requests = bool(self.requests)
        self.update_leader()
        leader, is_due = self._leader, self.action is not None
        self.action = None
        if leader is not None and leader.thread != get_ident():  # does not train between batches
            return False
        if leader is None or leader.is_over:
            if self._run.earlier is None and not self._run.keeps_iterators:
                return False
            self.action, self._waiting = action, set()
            return True
        counts = self._trained_at - leader.seen, self._run.progress.num_trained - self._trained_at
        if not has_requests and leader.rounds < 2 and min(counts) > 1:  # two steps on one batch
            self._run.report(KEPT)
            return False
        self._waiting = {leader, *(self._waiting if is_due else ())}
        self.action = action
        return True

    def update_leader(self) -> None:
        """Choose the leading loop, preferably one over the same loader as before."""
        requesting = [each for each in self.requests.values() if each.rounds and not each.is_over]
        self.requests.clear()
        if all(each.rounds == each.last_within for each in requesting):
            return
        before, self._trained_at = self._leader, self._run.progress.num_trained
        same = [each for each in requesting if before is not None and each.owner is before.owner]
        self._leader, self._step = (same or requesting)[0], requesting
        if any(each.has_led and each not in same for each in requesting):
            self._run.report(_TURNS)
        if self._leader is before or len(requesting) == 1:  # not just a kept iterator
            self._leader.has_led = self._leader.owner.leads = True
            if self.lines[-1:] != [self._leader.line] and not self.has_line_again:
                self.lines.append(self._leader.line)

    @property
    def has_line_again(self) -> bool:
        """Whether a line has led again after another."""
        return len({*self.lines}) < len(self.lines)

    def on_request(self, iteration: LoaderIteration) -> None:
        """Save the pending checkpoint if it was waiting for this iteration to request a batch."""
        steps = (iteration, *self._step)  # one may be exhausted, such as the shorter in a zip
        are_between = all(each.is_over or not each.is_complete for each in steps)
        if iteration in self._waiting and are_between:
            self.save()

    def begin_iteration(self, owner: Epochs) -> None:
        """Save the checkpoint that was waiting for this iteration.

        If the previous iteration was only a peek at a batch, save its checkpoint again. A run that
        resumes within an epoch of `run.epochs` always executes the code after a peek.
        """
        is_over = (self._leader is None or self._leader.is_over) and torch.is_grad_enabled()
        owners = {each.owner for each in self._waiting}
        if self._is_last and not owners:
            self.save()
        is_next = owner in owners if owners else owner.has_trained
        is_between = bool(owners) and self._run.earlier is not None and not self._run.open
        if not (is_over and (is_next or is_between)):
            return
        if (action := self.action) is not None:
            self.is_before_peek = self._run.earlier is None
            self.save()
            self.is_before_peek, self.again = False, action
        elif self.again is not None:
            if self.was_before_peek:
                self._run.report(_LOOKED)
            self.again()

    def save(self) -> None:
        action, self.action = self.action, None
        if action is not None:
            action()


KEPT = (
    "note: between two loops over loaders, the script trained on batches that it keeps, for example"
    " in a list or itertools.cycle. A resumed run keeps different batches, so it does not resume"
    " exactly. Loop over the loader itself"
)
_TURNS = (
    "note: loops over several loaders take turns: one is open while another yields the batches of a"
    " step. If the loops are nested or chosen at random, the run does not resume exactly. Use a"
    " batch from each loader in each step, or loop over the loaders one after another under"
    " run.epochs(n)"
)
_LOOKED = (
    "note: this run resumed from a checkpoint that was saved before a peek at a loader between two"
    " loops, and skipped the script's code after the peek. Peek at the loader under torch.no_grad()"
)
