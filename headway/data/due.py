"""The checkpoint that is due, and the loop over a loader by which it is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from headway.data.epochs import Epochs, Pass


class DueCheckpoint:
    """A checkpoint that waits for a place between two batches.

    `mark` notes that it is due, and it is taken when the loop that leads asks for its next batch:
    the first one that has asked since the last `mark`. After that loop's last batch it is taken
    when its loader's next pass begins, but for those under `torch.no_grad()`: what the script does
    between two epochs is part of it.

    Args:
        tell: reports what does not resume exactly.

    Attributes:
        action: takes it; None if none is due.
        asked: of each loader the latest pass that has asked since `mark`, the first first.
        leaders: loaders whose passes have led a step.
        lines: of the script, where the iterators of those passes were made.
        again: takes the latest one again, until something is trained.
        is_before_pass: whether it is taken as a pass begins, which may be a look at a batch; a run
            that resumes from there does not do what follows the look.
        was_before_pass: whether the run was resumed from such a one.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self.action: Callable[[], object] | None = None
        self.asked: dict[Epochs, Pass] = {}
        self.leaders: set[Epochs] = set()
        self.lines: set[str] = set()
        self.is_before_pass = self.was_before_pass = False
        self._leader: Pass | None = None
        self._step: list[Pass] = []  # those that have asked in its latest step
        self._waiting: set[Pass] = set()  # those that have led since it is due
        self.again: Callable[[], object] | None = None

    def mark(self, action: Callable[[], object]) -> bool:
        """Note that a checkpoint is due, in place of one that waits.

        False: there is no loop that could take it, and the caller has to at once.
        """
        is_asked = bool(self.asked)
        self.note_leader()
        leader = self._leader
        if leader is None or leader.is_over:
            self.action = None
            return False
        if not is_asked and leader.rounds < 2:  # several steps with one batch, and no loop so far
            self._tell(KEPT)
            self.action = None
            return False
        if self.action is None:
            self._waiting.clear()
        self._waiting.add(leader)
        self.action = action
        return True

    def note_leader(self) -> None:
        """Note which loop was the first to ask; one over the loader that has led leads on."""
        asked = [one for one in self.asked.values() if one.rounds and not one.is_over]
        self.asked.clear()
        if not asked:
            return
        before = self._leader
        same = [one for one in asked if before is not None and one.owner is before.owner]
        self._leader, self._step = (same or asked)[0], asked
        if any(one.has_led and one not in same for one in asked):
            self._tell(_TURNS)
        if self._leader is before or len(asked) == 1:  # and not only an iterator that is kept
            self._leader.has_led = True
            self.leaders.add(self._leader.owner)
            self.lines.add(self._leader.line)

    def ask(self, one: Pass) -> None:
        """Take it if it waits for this pass, which wants a batch.

        Not while a loop of this step is at its end, as the shorter one of a zip.
        """
        steps = (one, *self._step)
        if one in self._waiting and all(each.is_over or not each.is_complete for each in steps):
            self.take()

    def begin_pass(self, owner: Epochs, *, is_in_epoch: bool) -> None:
        """Take it if it waits for the next pass over a loader; after a look at it again.

        A run that resumes in an epoch of `run.epochs` does what follows a look in any case.
        """
        is_over = self._leader is not None and self._leader.is_over and torch.is_grad_enabled()
        if not is_over or all(one.owner is not owner for one in self._waiting):
            return
        if (action := self.action) is not None:
            self.is_before_pass = not is_in_epoch
            self.take()
            self.is_before_pass, self.again = False, action
        elif self.again is not None:
            if self.was_before_pass:
                self._tell(_LOOKED)
            self.again()

    def take(self) -> None:
        """Take it, if it is due."""
        action, self.action = self.action, None
        if action is not None:
            action()


KEPT = (
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
