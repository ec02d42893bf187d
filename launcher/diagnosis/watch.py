"""Reads the ranks' records, and requests their stacks if the run seems to hang."""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf

from headway.ipc import records
from headway.ipc.stderr import log
from headway.launcher.diagnosis import hang
from headway.launcher.diagnosis.hang import Hang, RankFacts, RankStatus, rank_status
from headway.launcher.diagnosis.stacks import read_state

_ANSWER_TIMEOUT_S = 3.0  # enough for a rank's thread on a busy machine
_SUSPENSION_S = 1.0  # if select() takes this much too long, Ctrl-Z stopped this process
_POLL_S = 0.02  # between reads while ranks answer
NO_GROUP_AFTER_S = 60  # from the start to the check whether ranks joined a process group
_ASK_INTERVAL_S = 10.0  # the longest interval if `hang_timeout` is set
_MAX_READ = 2**20  # bytes per read of a channel; more than its usual capacity
_MAX_INVALID = 100  # lines of one rank; afterwards its records are ignored


class Watch:
    """Reads the ranks' status channels in one thread until `close` is called.

    A run hangs if no rank reports progress or writes output for `hang_timeout_s`; None disables
    the check. Progress means a step, a new phase, a collective, an import, a start or an exit.

    `last_output_at` returns the monotonic time of the last output of any rank. The reading thread
    calls `note_stats`.
    """

    def __init__(
        self,
        hang_timeout_s: int | None,
        last_output_at: Callable[[], float],
        note_stats: Callable[[int, records.StepStats], None] = lambda *_: None,
    ) -> None:
        self.on_ready: Callable[[], None] | None = None  # called when all ranks run the script
        self.on_no_group: Callable[[], None] | None = None  # called if no rank has joined a group
        self._timeout_s = hang_timeout_s
        self._last_output_at = last_output_at
        self._note_stats = note_stats
        self._lock = threading.RLock()
        self.begin_attempt(0)
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._is_asked = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._listen, name="headway-watch", daemon=True)
        self._thread.start()

    def begin_attempt(self, num_ranks: int) -> None:
        """Discard the last attempt's ranks, and expect `num_ranks` new ranks on this machine."""
        with self._lock:
            self._ranks: dict[int, RankChannel] = {}
            self._num_starting = num_ranks  # 0 once all ranks are ready
            self._group_check_at = inf  # the time to check whether the ranks joined a group
            self.hang: Hang | None = None  # set once, after `hang_timeout_s`
            self._is_stopping = False
            self._progress_at = time.monotonic()

    def add(self, rank: int, pid: int, fd: int) -> RankChannel:
        """Start reading a new rank's channel, which is closed when the rank exits."""
        os.set_blocking(fd, False)
        with self._lock:
            channel = RankChannel(rank, pid, fd, partial(self._note_stats, rank))
            self._ranks[rank] = channel
            self._progress_at = time.monotonic()
            self._selector.register(fd, selectors.EVENT_READ)
        self._wake()
        return channel

    def end(self, rank: int, code: int) -> list[records.Crash | records.ScriptEnd]:
        """Close an exited rank's channel and return its exit records; keep its collectives."""
        with self._lock:
            ended = self._ranks[rank]
            if ended.code is None:
                ended.read()
                ended.code = code
                self._unregister(ended.fd)
                os.close(ended.fd)
            return ended.ends

    def begin_stop(self) -> None:
        """Stop looking for hangs, and ask the ranks whether they have unfinished work."""
        self._is_stopping = True
        with self._lock:
            for rank in self._ranks.values():
                rank.may_be_killed = False
        self._ask_all()

    def ask(self) -> None:
        """Make the thread print all stacks; may be called from a signal handler."""
        self._is_asked = True
        self._wake()

    def step(self) -> int:
        """Return the last training step that this attempt has reported; 0 if there is none."""
        with self._lock:
            known = self._ranks.values()
            return max((row.step for row in known if row.has_global_steps), default=0)

    def will_save(self) -> bool:
        with self._lock:
            return any(rank.will_save for rank in self._ranks.values())

    def kept(self) -> list[records.OutputPath]:
        """Return the output paths of this attempt, one of each kind."""
        first: dict[str, records.OutputPath] = {}
        with self._lock:
            for rank in self._ranks.values():
                first = rank.kept | first
        return [*first.values()]

    def statuses(self) -> list[RankStatus]:
        """Request the positions of running ranks, wait up to 3 s, and return all statuses."""
        with self._lock:
            ranks = [rank for _, rank in sorted(self._ranks.items())]
        self._ask_all()
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        # without the lock, so that other threads can use the ranks
        while any(r.is_silent and not read_state(r.pid).is_stopped for r in ranks):
            if self._is_closing or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
            self._read_all()
        with self._lock:
            return [rank.status for rank in ranks]

    def describe(self) -> str:
        """Return the formatted positions of all ranks; takes seconds if a rank does not answer."""
        progress_at = self._progress_at
        statuses = self.statuses()
        now = time.monotonic()
        entered_at = now - (time.time() - hang.last_collective_at(statuses))
        progress_at = max(progress_at, self._last_output_at(), entered_at)
        return hang.describe(statuses, max(now - progress_at, 0.0))

    def close(self) -> None:
        self._is_closing = True
        self._wake()
        self._thread.join()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        os.write(self._wake_write, b"\0")

    def _unregister(self, fd: int) -> None:
        with suppress(KeyError):  # the rank has already closed its end
            self._selector.unregister(fd)

    def _ask_all(self) -> None:
        with self._lock:
            for rank in self._ranks.values():
                rank.ask()

    def _read_all(self) -> None:
        with self._lock:
            for rank in self._ranks.values():
                if rank.read():
                    self._progress_at = time.monotonic()
                if rank.is_closed:
                    self._unregister(rank.fd)
            num_ready = sum(rank.is_ready for rank in self._ranks.values())
            if not 0 < num_ready == self._num_starting:
                return
            self._num_starting, self._group_check_at = 0, time.monotonic() + NO_GROUP_AFTER_S
            on_ready, self.on_ready = self.on_ready, None
        if on_ready is not None:
            on_ready()

    def _listen(self) -> None:
        every_s = inf if self._timeout_s is None else min(self._timeout_s / 4, _ASK_INTERVAL_S)
        asked_at = time.monotonic()
        while not self._is_closing:
            began = time.monotonic()
            ask_at = asked_at + every_s
            wait_s = max(min(ask_at, self._group_check_at) - began, 0.0)
            ready = self._selector.select(None if wait_s == inf else wait_s)
            if time.monotonic() > began + wait_s + _SUSPENSION_S:
                self._progress_at = time.monotonic()
            if any(key.fd == self._wake_read for key, _ in ready):
                os.read(self._wake_read, 4096)
            self._read_all()
            if time.monotonic() >= ask_at:
                asked_at = time.monotonic()
                self._ask_all()
            if self._is_asked:
                self._is_asked = False
                log(self.describe())
            self._check_for_hang()
            if time.monotonic() >= self._group_check_at:
                self._group_check_at = inf
                if self.on_no_group is None or self._is_stopping:
                    continue
                if all(status.groups == () for status in self.statuses()):
                    self.on_no_group()

    def _check_for_hang(self) -> None:
        if self._timeout_s is None or self.hang is not None or not self._ranks:
            return
        if not self._is_stalled(self._timeout_s):
            return
        statuses = self.statuses()
        if self._is_stalled(self._timeout_s):  # no progress during the request either
            log(f"no progress for {self._timeout_s} s{hang.describe_stacks(statuses)}")
            self.hang = Hang(tuple(statuses), self._timeout_s)

    def _is_stalled(self, for_s: float) -> bool:
        since = max(self._progress_at, self._last_output_at())
        return not self._is_stopping and time.monotonic() - since >= for_s


class RankChannel:
    def __init__(
        self,
        rank: int,
        pid: int,
        channel: int,
        note_stats: Callable[[records.StepStats], None] = lambda _: None,
    ) -> None:
        self.rank = rank
        self._note_stats = note_stats
        self.fd = channel
        self.is_closed = False  # whether the rank has closed it
        self.code: int | None = None  # exit code; None while the process is running
        self.ends: list[records.Crash | records.ScriptEnd] = []  # as reported
        self.is_asked = False  # whether an answer is pending
        self.will_save = False  # whether the rank saves when it is stopped
        self.may_be_killed = False  # whether it has no unfinished work, as it last answered
        self.kept: dict[str, records.OutputPath] = {}  # the last record of each kind
        self.pid = pid
        self._reader = records.RecordReader()
        self._num_invalid = 0  # lines on the channel
        self.is_ready = False  # whether the rank answers requests
        self._answer: records.StatusReply | None = None
        self._groups: tuple[records.Group, ...] | None = None
        self._progress: records.ProgressSnapshot | None = None
        self._stats: records.StepStats | None = None  # the last stats, updated with later progress
        self.has_global_steps = True  # according to the last timed steps

    def read(self) -> bool:
        """Read the available data up to a limit; return whether it shows progress."""
        if self.code is not None:
            return False
        sent = b""
        with suppress(BlockingIOError, ConnectionResetError):
            sent = os.read(self.fd, _MAX_READ)
            self.is_closed = not sent
        shows_progress = False
        if self._num_invalid < _MAX_INVALID:  # read anyway, so that the rank never blocks
            for record in self._reader.read(sent):
                shows_progress |= self._store(record)
                if self._num_invalid == _MAX_INVALID:
                    break
        return shows_progress

    def _store(self, record: records.Record | ValueError) -> bool:
        """Store a record; return whether it shows progress."""
        if isinstance(record, ValueError):
            self._num_invalid += 1
            if self._num_invalid == 1:
                log(
                    f"note: ignored invalid data that rank {self.rank} wrote to the launcher's "
                    f"status channel: {record}"
                )
        elif isinstance(record, records.RankReady):
            self.is_ready = True
            return True
        elif isinstance(record, records.WillSave):
            self.will_save = record.is_enabled
        elif isinstance(record, records.OutputPath):
            self.kept[record.what] = record
        elif isinstance(record, records.ProgressSnapshot):
            self._note_progress(record)
            return True
        elif isinstance(record, records.StepStats):
            self._progress = records.ProgressSnapshot(
                record.step, total=record.total, loss=record.loss
            )
            self._stats = record
            if record.num_steps:
                self.has_global_steps = record.has_global_steps
            self._note_stats(record)
            return True
        elif isinstance(record, records.StatusReply):
            return self._store_answer(record)
        elif isinstance(record, (records.Crash, records.ScriptEnd)):
            self.ends.append(record)
            self._groups = record.groups
            return True
        return False

    def _store_answer(self, answer: records.StatusReply) -> bool:
        self.is_asked = False
        self.may_be_killed = answer.may_be_killed and not self.ends
        before, self._answer, self._groups = self._answer, answer, answer.groups
        if answer.progress != records.ProgressSnapshot():  # the script uses an Accelerator
            self._note_progress(answer.progress)
        return before is not None and _progress_key(answer) != _progress_key(before)

    def _note_progress(self, progress: records.ProgressSnapshot) -> None:
        """Store a position, and add missing steps to the rank's statistics."""
        self._progress = progress
        if self._stats is not None and progress.step > self._stats.step:
            self._stats = self._stats.empty_at(progress.step, progress.loss)
            self._note_stats(self._stats)

    def ask(self) -> None:
        """Request the rank's position, unless a request is pending."""
        if self.code is None and self.is_ready and not self.is_asked:
            with suppress(OSError):
                os.write(self.fd, b"?")
                self.is_asked = True

    def has_failed(self, since: float) -> bool:
        """Return whether the rank reported a failure before `since`, in seconds since the epoch."""
        return any(
            end.code not in (0, records.STOPPED_AND_SAVED) and end.time < since for end in self.ends
        )

    @property
    def is_silent(self) -> bool:
        """Whether an answer is pending; ranks with closed channels cannot answer."""
        return self.code is None and self.is_asked and not self.is_closed

    @property
    def step(self) -> int:
        return self._progress.step if self._progress is not None else 0

    @property
    def status(self) -> RankStatus:
        is_closed = self.code is None and self.is_closed
        return rank_status(
            RankFacts(
                self.rank,
                self.code,
                self.ends,
                None if is_closed and not self.ends else self._groups,
                self._progress,
                None if is_closed else self._answer,
                read_state(self.pid) if self.is_silent else None,
            )
        )


def _progress_key(answer: records.StatusReply) -> object:
    """Return a value that changes between answers if the rank makes progress."""
    progress = answer.progress  # without the loss, because NaN differs from itself
    return answer.groups, progress.step, progress.phase, answer.num_modules
