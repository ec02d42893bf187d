"""Stops a library's training when the job has to stop: all ranks agree, and leave with one code."""

from __future__ import annotations

import threading
from typing import NoReturn

import torch

from headway.checkpoint.stopping import Agreement, Request, StopSignals, tell_stopped
from headway.contract.notes import say, say_once
from headway.contract.records import channel
from headway.contract.run import RunContract
from headway.distributed.world import rank_and_size


class Stopping:
    """Notes what asks a training to stop, from its beginning to its end.

    `request` is what all ranks have agreed on.
    """

    def __init__(self, run: RunContract, device: torch.device) -> None:
        self.request = Request.NONE
        self._has_left = False
        self._signals = StopSignals(run.deadline())
        self._by_steps, self._by_saves = Agreement(device), Agreement(device)

    def begin(self) -> None:
        """Begin to note signals."""
        channel.has_resumed = channel.obeys_stops = True
        if threading.current_thread() is threading.main_thread():
            self._signals.trap()
        else:
            say_once("note: training in another thread than the first: signals end it as ever")

    def is_asked(self) -> bool:
        """Return whether the job has to stop; every rank asks equally often."""
        if not self.request:
            self.request = self._by_steps.ask(self._signals.request)
        return bool(self.request)

    def meet(self) -> bool:
        """Wait until all ranks have called this, and return whether the job has to stop."""
        wanted = self.request or self._signals.request
        self.request = self._by_saves.agree(wanted, False, 0).request
        return bool(self.request)

    def leave(self, step: int, saved: str, *, is_noted: bool) -> NoReturn:
        """End this process, on all ranks, once all is saved.

        `is_noted`: rank 0 has noted the stop, so that the same run, when it is run again, goes on.
        """
        again = "run the same command again to go on" if is_noted else "--resume latest goes on"
        tell_stopped(self.request, step, saved, again)
        self._signals.leave()
        self._has_left = True
        raise SystemExit(self.request.exit_code)

    def release(self) -> None:
        """Let signals do what they did before, once the training is over."""
        if self._has_left:
            return
        if (late := self._signals.request) and rank_and_size()[0] == 0:
            say(f"the training is over: {late} stops nothing any more")
        self._signals.release()
