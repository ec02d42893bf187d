"""Reads the records that the ranks send, and asks where they are when the run seems to hang."""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from headway.contract.notes import say
from headway.contract.records import STOPPED_AND_SAVED, Crash, End
from headway.contract.step_clock import Figures
from headway.launcher.diagnosis import hang
from headway.launcher.diagnosis.hang import Hang, Observation, RankStatus, Verdict, newest_entry
from headway.launcher.diagnosis.rank_channel import RankChannel

_ANSWER_WITHIN_S = 3.0  # a rank; more than its thread needs on a busy machine
_STACKS_WITHIN_S = 2.0  # faulthandler, after its signal
_SUSPENDED_S = 1.0  # a select() that took so much too long: this process was stopped (Ctrl-Z)
_POLL_S = 0.02
_ASK_EVERY_S = 10.0  # at most, of ranks under `hang_timeout`
_OBSERVE_S = 15.0  # at most, until ranks that seem to hang have moved
_OBSERVE_EVERY_S = 0.25


class Watch:
    """One thread that reads the ranks' status channels and stacks until `close`.

    With `hang_timeout_s` None no run hangs. `last_output_at` returns when a rank last wrote any
    output, on the monotonic clock; `note_figures` is called by the thread that reads.
    """

    def __init__(
        self,
        hang_timeout_s: int | None,
        last_output_at: Callable[[], float],
        note_figures: Callable[[int, Figures], None] = lambda *_: None,
    ) -> None:
        self.hang: Hang | None = None  # set once, after `hang_timeout_s`
        self._timeout_s = hang_timeout_s
        self._last_output_at = last_output_at
        self._note_figures = note_figures
        self._ranks: dict[int, RankChannel] = {}  # of this attempt
        self._progress_at = time.monotonic()
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._is_asked = False
        self._is_closing = False
        self._is_stopping = False
        self._reporter: threading.Thread | None = None  # answers Ctrl-\\
        self._thread = threading.Thread(target=self._listen, name="headway-watch", daemon=True)
        self._thread.start()

    def begin_attempt(self) -> None:
        """Forget the ranks of the last attempt."""
        with self._lock:
            self._ranks.clear()
            self.hang = None
            self._is_stopping = False
            self._progress_at = time.monotonic()

    def add(
        self,
        rank: int,
        pid: int,
        channel: int,
        stacks: int,
        send_signal: Callable[[int], object],
    ) -> None:
        """Read a new rank's channel and pipe of stacks; both are closed when it ends."""
        with self._lock:
            self._ranks[rank] = RankChannel(
                rank, pid, channel, stacks, send_signal, partial(self._note_figures, rank)
            )
            self._progress_at = time.monotonic()
            for fd in (channel, stacks):
                os.set_blocking(fd, False)
                self._selector.register(fd, selectors.EVENT_READ)
        self._wake()

    def end(self, rank: int, code: int) -> list[Crash | End]:
        """Close the channel of a rank whose process has ended; return how it reported its end.

        The collectives that it reported stay, to be compared with the others'.
        """
        with self._lock:
            ended = self._ranks.get(rank)
            if ended is None:  # a signal came before it was added
                return []
            if ended.code is None:
                ended.read()
                ended.code = code
                for fd in ended.fds:
                    self._forget(fd)
                    os.close(fd)
            return ended.ends

    def crash_stack(self, rank: int) -> list[str]:
        """Return where the process of a rank crashed, if faulthandler wrote it."""
        known = self._ranks.get(rank)
        return known.crash_stack if known else []

    def has_failed(self, rank: int) -> bool:
        """Return whether a rank has told that its program failed; its process may still run."""
        known = self._ranks.get(rank)
        return any(one.code not in (0, STOPPED_AND_SAVED) for one in known.ends) if known else False

    def begin_to_stop(self) -> None:
        """Look for no hang any more: ranks that are being stopped make no progress."""
        self._is_stopping = True

    def ask(self) -> None:
        """Have all ranks' stacks printed; may be called from a signal handler."""
        self._is_asked = True
        self._wake()

    def has_trained(self) -> bool:
        """Return whether a rank of this attempt has told of an optimizer step."""
        with self._lock:
            return any(one.has_trained for one in self._ranks.values())

    def step(self) -> int:
        """Return the last optimizer step that a rank of this attempt has told of; 0: none has."""
        with self._lock:
            return max((one.step for one in self._ranks.values()), default=0)

    def last_word(self) -> str:
        """Return how far the rank is that has told of the most optimizer steps; may be empty."""
        steps = {one.rank: one.step for one in self._ranks.copy().values()}
        furthest = max(steps, key=lambda rank: steps[rank], default=None)
        if furthest is None or not steps[furthest]:
            return ""
        return f"rank {furthest} at optimizer step {steps[furthest]}"

    def will_save(self) -> bool:
        """Return whether a rank of this attempt saves once it is asked to stop."""
        with self._lock:
            return any(one.will_save for one in self._ranks.values())

    def saved_in(self) -> str:
        """Return the folder of the checkpoints of this attempt; empty where there is none."""
        with self._lock:
            return next((one.saved_in for one in self._ranks.values() if one.saved_in), "")

    def statuses(self) -> list[RankStatus]:
        """Ask the running ranks where they are; return what is known of all on this machine.

        Takes up to three seconds if a rank does not answer.
        """
        ranks = self._ask_and_wait()
        with self._lock:
            return [one.status for one in ranks]

    def observe(self, interrupt: bool = False) -> Observation:
        """Watch the ranks until it is clear whether they move, for some seconds at most.

        With `interrupt`, ranks that do not answer get SIGQUIT, on which faulthandler writes their
        stacks; it interrupts system calls of the script.
        """
        began = time.monotonic()
        while True:
            ranks = self._ask_and_wait()
            seen = self._seen(ranks, since=began)
            if (
                seen.verdict is not Verdict.TOO_EARLY
                or self._is_closing
                or time.monotonic() - began > _OBSERVE_S
            ):
                break
            time.sleep(_OBSERVE_EVERY_S)
        if interrupt:
            with self._lock:
                for one in ranks:
                    one.interrupt()
            self._wait(_STACKS_WITHIN_S, lambda: any(one.owes_stacks for one in ranks))
            seen = self._seen(ranks, since=began)
        return seen

    def close(self) -> None:
        """End the thread."""
        self._is_closing = True
        self._wake()
        self._thread.join()
        if self._reporter is not None and self._reporter.is_alive():
            self._reporter.join()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        os.write(self._wake_write, b"\0")

    def _forget(self, fd: int) -> None:
        with suppress(KeyError):  # the rank closed its end before
            self._selector.unregister(fd)

    def _ask_all(self) -> list[RankChannel]:
        with self._lock:
            ranks = [one for _, one in sorted(self._ranks.items())]
            for one in ranks:
                one.ask()
            return ranks

    def _ask_and_wait(self) -> list[RankChannel]:
        ranks = self._ask_all()
        self._wait(_ANSWER_WITHIN_S, lambda: any(one.is_silent for one in ranks))
        return ranks

    def _wait(self, for_s: float, is_pending: Callable[[], bool]) -> None:
        """Read what the ranks send while `is_pending`; other threads may use them meanwhile."""
        deadline = time.monotonic() + for_s
        while is_pending() and time.monotonic() < deadline and not self._is_closing:
            time.sleep(_POLL_S)
            self._read_all()

    def _read_all(self) -> None:
        with self._lock:
            for one in self._ranks.values():
                if one.read():
                    self._progress_at = time.monotonic()
                for fd in one.closed:
                    self._forget(fd)

    def _seen(self, ranks: list[RankChannel], since: float) -> Observation:
        with self._lock:
            statuses = tuple(one.status for one in ranks)
            moved_after = max((one.moved_after for one in ranks), default=0.0)
            began_at = max((one.began_at for one in ranks), default=since)
        now, output_at = time.monotonic(), self._last_output_at()
        entered_at = now - (time.time() - newest_entry(statuses))
        return Observation(
            statuses,
            has_moved=max(moved_after, output_at) >= since,
            still_s=now - max(began_at, moved_after, output_at, min(entered_at, now)),
        )

    def _listen(self) -> None:
        every_s = None if self._timeout_s is None else min(self._timeout_s / 4, _ASK_EVERY_S)
        asked_at = time.monotonic()
        while not self._is_closing:
            began = time.monotonic()
            ready = self._selector.select(every_s)
            if every_s is not None and time.monotonic() > began + every_s + _SUSPENDED_S:
                self._progress_at = time.monotonic()
            if any(key.fd == self._wake_read for key, _ in ready):
                os.read(self._wake_read, 4096)
            self._read_all()
            if every_s is not None and time.monotonic() >= asked_at + every_s:
                asked_at = time.monotonic()
                self._ask_all()
            if self._is_asked:
                self._is_asked = False
                self._begin_report()
            self._look_for_a_hang()

    def _begin_report(self) -> None:
        """Print where the ranks are, by a thread of its own: the ranks are watched meanwhile."""
        if self._reporter is None or not self._reporter.is_alive():
            self._reporter = threading.Thread(
                target=lambda: say(self.observe().describe()), name="headway-report", daemon=True
            )
            with suppress(RuntimeError):  # too many threads
                self._reporter.start()

    def _look_for_a_hang(self) -> None:
        if self._timeout_s is None or self.hang is not None or not self._ranks:
            return
        if not self._has_stood_still(self._timeout_s):
            return
        statuses = self.statuses()
        if self._has_stood_still(self._timeout_s):  # also while the ranks were asked
            say(f"no progress for {self._timeout_s} s{hang.describe_stacks(statuses)}")
            self.hang = Hang(tuple(statuses), self._timeout_s)

    def _has_stood_still(self, for_s: float) -> bool:
        since = max(self._progress_at, self._last_output_at())
        return not self._is_stopping and time.monotonic() - since >= for_s
