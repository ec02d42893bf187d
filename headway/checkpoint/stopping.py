"""Requests to stop, by a signal or a deadline, on which all ranks agree at the same step."""

from __future__ import annotations

import atexit
import os
import signal
import time
from enum import IntEnum
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from headway.distributed.world import group_backend, rank_and_size
from headway.ipc import signals
from headway.ipc.progress import Progress
from headway.ipc.records import STOPPED_AND_SAVED, WillSave
from headway.ipc.stderr import log, log_in_handler

INTERRUPTED = 130

_AGREE_EVERY_S = 0.5
_GROWTH = 8  # at most, of the steps from one agreement to the next
_CPU = torch.device("cpu")


class StopRequest(IntEnum):
    """Why the job must stop; the greatest of several counts."""

    NONE = 0
    TIME_LIMIT = 1
    SIGUSR1 = 2
    SIGHUP = 3  # the terminal is closed
    SIGTERM = 4
    SIGINT = 5

    def __str__(self) -> str:
        return "the time limit" if self is StopRequest.TIME_LIMIT else self.name


class StopSignals:
    """Notes requests to stop: a deadline (of `time.monotonic()`), and signals when trapped.

    The script's earlier handlers are called as well. An ignored signal stays ignored, and a second
    Ctrl-C has its earlier effect.
    """

    def __init__(self, progress: Progress, deadline: float | None = None) -> None:
        self._progress, self._deadline = progress, deadline
        self._came = StopRequest.NONE
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()

    @property
    def request(self) -> StopRequest:
        is_late = self._deadline is not None and time.monotonic() >= self._deadline
        return self._came or (StopRequest.TIME_LIMIT if is_late else StopRequest.NONE)

    def exit_code(self, request: StopRequest) -> int:
        """Return the exit code after a request; the launcher itself replaces that of Ctrl-C."""
        is_alone = not self._progress.is_connected
        return INTERRUPTED if request is StopRequest.SIGINT and is_alone else STOPPED_AND_SAVED

    def trap(self) -> None:
        """Start to note signals; Python allows this in the main thread only."""
        before = {stop: signal.getsignal(stop) for stop in signals.STOPS}
        self._before = {stop: before[stop] for stop in before if before[stop] != signal.SIG_IGN}
        signals.trap(self._note, *self._before)
        os.register_at_fork(after_in_child=self._leave_child)
        self._progress.note_use(stopping=True)
        self._progress.send(WillSave())

    def may_be_killed(self) -> bool:
        """Return whether SIGTERM calls nothing else, set before or since, and nothing is saved."""
        is_ours = signal.getsignal(signal.SIGTERM) == self._note
        is_alone = is_ours and signals.is_default_handler(self._before[signal.SIGTERM])
        return is_alone and not self._progress.is_saving

    def release(self) -> None:
        """Restore the earlier handlers, unless the script has set others since."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:
                signals.restore_handlers({number: before})
        self._before = {}
        self._progress.send(WillSave(False))

    def leave(self) -> None:
        """Ignore further requests while this process exits; a second Ctrl-C acts as before."""
        self._came = self.request or StopRequest.TIME_LIMIT
        before = self._before.pop(signal.SIGINT, None)
        if before is not None and signal.getsignal(signal.SIGINT) == self._note:
            signals.restore_handlers({signal.SIGINT: before})
        atexit.register(self._ignore)  # the last one to be registered is the first to be called

    def _ignore(self) -> None:
        """Ignore signals until the process exits; Python calls no handlers while it shuts down."""
        for number in self._before:
            if signal.getsignal(number) == self._note:
                signals.ignore(number)

    def _leave_child(self) -> None:
        """In a forked child, restore SIGTERM's handler; its parent handles all else."""
        before = self._before.get(signal.SIGTERM)
        if before is not None and signal.getsignal(signal.SIGTERM) == self._note:
            signals.restore_handlers({signal.SIGTERM: before})

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a loader's worker serves on until the rank leaves
            return
        before = self._before[number]
        came = StopRequest[signal.Signals(number).name]
        is_first, is_again = self._came is StopRequest.NONE, self._came is came
        self._came = max(self._came, came)
        if is_first:
            again = "; Ctrl-C again stops at once" if came is StopRequest.SIGINT else ""
            rank, size = rank_and_size()
            if_all = ", if all ranks complete it" if size > 1 else ""  # one may have failed
            if rank == 0:
                log_in_handler(f"{came}: saving and stopping after this step{if_all}{again}")
        is_called = before is not None and not signals.is_default_handler(before)
        if is_called or (came is StopRequest.SIGINT and is_again):
            before(number, frame)


def log_stopped(request: StopRequest, step: int, saved: str, hint: str) -> None:
    """Print on rank 0 what stopped the training, and how to resume it."""
    if rank_and_size()[0] == 0:
        log(f"stopped by {request} after step {step}; saved {saved}; {hint}")


class Agreement:
    """Makes all ranks agree every few units, steps or calls, timed by rank 0's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._agreed_at: float | None = None
        # units of the last agreement (or the first unit), and of the next one
        self._unit = self.next_at = 0
        self._num_asked = 0  # by `ask`

    def begin(self, unit: int) -> None:
        self._unit = unit

    @property
    def is_near(self) -> bool:
        return self._num_asked >= self.next_at

    def ask(self, request: StopRequest) -> StopRequest:
        """Return the request that all ranks agree on; NONE in calls without an agreement."""
        agreed = self.agree(self._num_asked, request)[0] if self.is_near else StopRequest.NONE
        self._num_asked += 1
        return agreed

    def agree(
        self, unit: int, request: StopRequest, *, is_due: bool = False
    ) -> tuple[StopRequest, bool]:
        """Return the agreed request, and whether a save is due; all call this at this unit.

        `is_due` counts on rank 0 alone.
        """
        now, before, units = time.monotonic(), self._agreed_at, unit - self._unit
        self._agreed_at, self._unit = now, unit
        following = 1
        if before is not None and units > 0:
            fitting = int(_AGREE_EVERY_S * units / max(now - before, 1e-9))
            following = max(1, min(fitting, _GROWTH * units))
        rank, size = rank_and_size()
        mine = (int(request), int(is_due), following) if rank == 0 else (int(request), 0, 0)
        if size > 1:
            has_cpu = group_backend(_CPU) is not None
            told = torch.tensor(mine, device=_CPU if has_cpu else self._device)
            dist.all_reduce(told, dist.ReduceOp.MAX)
            mine = tuple(told.tolist())
        self.next_at = unit + mine[2]
        return StopRequest(mine[0]), bool(mine[1])
