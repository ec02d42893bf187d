"""Stop requests by signal or deadline, and the agreement of all ranks on when to stop."""

from __future__ import annotations

import atexit
import math
import os
import signal
import time
from enum import IntEnum
from functools import partial
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

_AGREE_EVERY_S = 0.5  # at most, between agreements of the ranks; a stop waits about this long
_GROWTH = 2  # maximum factor between successive agreement intervals, as steps may become slow
_CPU = torch.device("cpu")


class StopRequest(IntEnum):
    """A reason to stop the job; if there are several, the one with the highest value applies."""

    NONE = 0
    TIME_LIMIT = 1
    SIGUSR1 = 2
    SIGXCPU = 3  # a limit on CPU time
    SIGHUP = 4  # terminal closed
    SIGTERM = 5
    SIGINT = 6

    def __str__(self) -> str:
        return "the time limit" if self is StopRequest.TIME_LIMIT else self.name


class StopSignals:
    """Records stop requests from signals, and from a deadline in `time.monotonic()` seconds.

    The script's own handlers are called as well. Signals that the script ignores remain ignored,
    and a second Ctrl-C has the effect that it would have without this class.
    """

    def __init__(self, progress: Progress, deadline: float | None = None) -> None:
        self._progress, self._deadline = progress, deadline
        self._received = StopRequest.NONE
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()

    @property
    def request(self) -> StopRequest:
        is_late = self._deadline is not None and time.monotonic() >= self._deadline
        return self._received or (StopRequest.TIME_LIMIT if is_late else StopRequest.NONE)

    def exit_code(self, request: StopRequest) -> int:
        """Return the exit code for a request: 130 for Ctrl-C without a launcher, otherwise 75."""
        is_alone = not self._progress.is_connected
        return INTERRUPTED if request is StopRequest.SIGINT and is_alone else STOPPED_AND_SAVED

    def trap(self) -> None:
        """Trap stop signals; Python allows this only in the main thread."""
        before = {stop: signal.getsignal(stop) for stop in signals.PREEMPTION_SIGNALS}
        self._before = {stop: before[stop] for stop in before if before[stop] != signal.SIG_IGN}
        signals.trap(self._record, *self._before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)  # the parent may have blocked them
        # in a forked child; its parent handles the other signals
        os.register_at_fork(after_in_child=partial(self._restore, signal.SIGTERM))
        self._progress.note_use(stopping=True)
        self._progress.send(WillSave())

    def may_be_killed(self) -> bool:
        """Return whether the script has no handler for SIGTERM and no save is in progress."""
        is_ours = signal.getsignal(signal.SIGTERM) == self._record
        is_alone = is_ours and signals.is_default_handler(self._before[signal.SIGTERM])
        return is_alone and not self._progress.is_saving

    def release(self) -> None:
        """Restore the previous signal handlers, unless the script has replaced Headway's."""
        self._restore(*self._before)
        self._before = {}
        self._progress.send(WillSave(False))

    def leave(self) -> None:
        """Ignore further requests while this process exits, except a second Ctrl-C."""
        self._received = self.request or StopRequest.TIME_LIMIT
        self._restore(signal.SIGINT)
        self._before.pop(signal.SIGINT, None)
        atexit.register(self._ignore)  # the last registered handler is called first

    def _ignore(self) -> None:
        """Ignore signals until this process exits; during shutdown, Python runs no handlers."""
        for number in self._before:
            if signal.getsignal(number) == self._record:
                signals.trap(signal.SIG_IGN, number)

    def _restore(self, *numbers: int) -> None:
        """Restore the previous handlers, except where the script has replaced Headway's."""
        for number in numbers:
            if signal.getsignal(number) == self._record:
                signals.restore_handlers({number: self._before.get(number)})

    def _record(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # loader workers continue until the rank exits
            return
        before = self._before[number]
        came = StopRequest[signal.Signals(number).name]
        is_first, is_again = self._received is StopRequest.NONE, self._received is came
        self._received = max(self._received, came)
        if is_first:
            again = "; press Ctrl-C again to stop at once" if came is StopRequest.SIGINT else ""
            rank, size = rank_and_size()
            step = "the next step" + " that all ranks agree on" * (size > 1)
            if rank == 0:
                log_in_handler(f"{came}: requested to save and stop after {step}{again}")
        is_called = before is not None and not signals.is_default_handler(before)
        # with a launcher, a second one may be the first, forwarded; the launcher counts its own
        is_second = came is StopRequest.SIGINT and is_again and not self._progress.is_connected
        if is_called or is_second:
            try:
                before(number, frame)
            except BaseException as error:
                if is_called:
                    why = f"the script's own handler raised {type(error).__name__}"
                    log_in_handler(f"{came}: not saving: {why}; fix: return from it")
                raise


def log_stopped(request: StopRequest, step: int, saved: str, hint: str) -> None:
    """Log on rank 0 why training stopped, and how to resume it."""
    if rank_and_size()[0] == 0:
        log(f"stopped by {request} after step {step}; saved {saved}; {hint}")


class Agreement:
    """Makes all ranks agree on stop requests every few units, which are steps or calls."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._agreed_at: float | None = None
        # units of the previous (or the first) and the next agreement
        self._unit = self.next_at = 0
        self._num_calls = 0  # calls to `ask`

    def begin(self, unit: int) -> None:
        self._unit = unit

    @property
    def is_near(self) -> bool:
        return self._num_calls >= self.next_at

    def ask(self, request: StopRequest) -> StopRequest:
        """Return the request that all ranks agree on; NONE if no agreement is due in this call."""
        agreed = self.agree(self._num_calls, request)[0] if self.is_near else StopRequest.NONE
        self._num_calls += 1
        return agreed

    def agree(
        self, unit: int, request: StopRequest, *, due_in_s: float = math.inf
    ) -> tuple[StopRequest, bool]:
        """Return the agreed request and whether a save is due; all ranks must pass the same `unit`.

        `due_in_s`, the time until a save is due, is used only on rank 0. The next agreement is at
        the last unit before that time.
        """
        now, before, units = time.monotonic(), self._agreed_at, unit - self._unit
        self._agreed_at, self._unit = now, unit
        following = 1
        if before is not None and units > 0:
            fitting = int(min(_AGREE_EVERY_S, due_in_s) * units / max(now - before, 1e-9))
            following = max(1, min(fitting, _GROWTH * units))
        rank, size = rank_and_size()
        mine = (int(request), int(due_in_s <= 0), following) if rank == 0 else (int(request), 0, 0)
        if size > 1:
            has_cpu = group_backend(_CPU) is not None
            reduced = torch.tensor(mine, device=_CPU if has_cpu else self._device)
            dist.all_reduce(reduced, dist.ReduceOp.MAX)
            mine = tuple(reduced.tolist())
        self.next_at = unit + mine[2]
        return StopRequest(mine[0]), bool(mine[1])
