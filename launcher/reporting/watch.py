"""Reads the records that the ranks send, and asks where they are when the run seems to hang."""

from __future__ import annotations

import os
import selectors
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from headway.contract.records import (
    Answer,
    AnswersQuestions,
    Crash,
    End,
    Group,
    Heartbeat,
    Progress,
    Ready,
    Record,
    RecordReader,
    Refused,
)
from headway.launcher.reporting import hang
from headway.launcher.reporting.foreign_messages import CAUGHT_SIGNALS, STATE, STOPPED_STATES
from headway.launcher.reporting.hang import Exit, Hang, NoStack, RankStatus
from headway.launcher.reporting.stacks import (
    Stack,
    describe_crash,
    is_complete,
    is_truncated,
    parse_stacks,
    parse_traceback,
    waits_for_threads,
    without_launcher_frames,
)

_ANSWER_WITHIN_S = 1.0  # for the collectives, and then again for the stacks
_SUSPENDED_S = 1.0  # a select() that took so much too long: this process was stopped (Ctrl-Z)
_QUIET_S = 0.5  # stacks that have not grown for so long are complete, whatever they end with
_POLL_S = 0.02
_READ_SIZE = 65536
_MAX_READ = 2**20  # bytes of one descriptor at a time, more than a pipe or socket usually holds
_MAX_REFUSED = 100  # lines of one rank; then nothing more that it sends is looked at
_ASK_EVERY_S = 10.0  # at most, for the collectives of ranks under `hang_timeout`


class Watch:
    """One thread that reads the ranks' status channels and stacks until `close`.

    Args:
        hang_timeout_s: the run hangs after so long without progress; None: never.
        last_output_at: returns when a rank last wrote any output, on the monotonic clock.
    """

    def __init__(self, hang_timeout_s: int | None, last_output_at: Callable[[], float]) -> None:
        self.hang: Hang | None = None  # set once, after `hang_timeout_s`
        self._timeout_s = hang_timeout_s
        self._last_output_at = last_output_at
        self._ranks: dict[int, _Rank] = {}  # of this attempt
        self._progress_at = time.monotonic()
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._is_asked = False
        self._is_closing = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._listen, name="headway-watch", daemon=True)
        self._thread.start()

    def begin_attempt(self) -> None:
        """Forget the ranks of the last attempt."""
        with self._lock:
            self._ranks.clear()
            self.hang = None
            self._is_stopping = False
            self._progress_at = time.monotonic()

    def add(self, rank: int, pid: int, channel: int, stacks: int) -> None:
        """Read a new rank's channel and pipe of stacks; both are closed when it ends."""
        with self._lock:
            self._ranks[rank] = _Rank(rank, pid, channel, stacks)
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
        return describe_crash(known.text) if known else []

    def begin_to_stop(self) -> None:
        """Look for no hang any more: ranks that are being stopped make no progress."""
        self._is_stopping = True

    def ask(self) -> None:
        """Have all ranks' stacks printed; may be called from a signal handler."""
        self._is_asked = True
        self._wake()

    def statuses(self) -> list[RankStatus]:
        """Ask the running ranks where they are; return what is known of all on this machine.

        Takes up to two seconds if a rank cannot answer.
        """
        with self._lock:
            ranks = [one for _, one in sorted(self._ranks.items())]
            for ask in (_Rank.ask_for_groups, _Rank.ask_for_stacks):
                for one in ranks:
                    ask(one)
                deadline = time.monotonic() + _ANSWER_WITHIN_S
                while time.monotonic() < deadline and any(one.owes_an_answer for one in ranks):
                    time.sleep(_POLL_S)
                    for one in ranks:
                        one.read()
            return [one.status for one in ranks]

    def close(self) -> None:
        """End the thread."""
        self._is_closing = True
        self._wake()
        self._thread.join()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        os.write(self._wake_write, b"\0")

    def _forget(self, fd: int) -> None:
        with suppress(KeyError):  # the rank closed its end before
            self._selector.unregister(fd)

    def _listen(self) -> None:
        every_s = None if self._timeout_s is None else min(self._timeout_s / 4, _ASK_EVERY_S)
        while not self._is_closing:
            began = time.monotonic()
            ready = self._selector.select(every_s)
            if every_s is not None and time.monotonic() > began + every_s + _SUSPENDED_S:
                self._progress_at = time.monotonic()
            with self._lock:
                if any(key.fd == self._wake_read for key, _ in ready):
                    os.read(self._wake_read, 4096)
                for one in self._ranks.values():
                    if one.read():
                        self._progress_at = time.monotonic()
                    for fd in one.closed:
                        self._forget(fd)
                    if every_s is not None and not ready:
                        one.ask_for_groups()
            if self._is_asked:
                self._is_asked = False
                self._report()
            self._look_for_a_hang()

    def _report(self) -> None:
        statuses = self.statuses()
        say(f"stacks of {len(statuses)} ranks\n{hang.describe(statuses)}")

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


class _Rank:
    """One rank and what it has sent."""

    def __init__(self, rank: int, pid: int, channel: int, stacks: int) -> None:
        self.fds = (channel, stacks)
        self.closed: set[int] = set()  # of these, by the rank
        self.code: int | None = None  # of its process, once that has ended
        self.ends: list[Crash | End] = []  # as it reported them
        self.text = ""  # what faulthandler wrote
        self._rank = rank
        self._pid = pid
        self._reader = RecordReader()
        self._shows_stacks: bool | None = None  # on SIGQUIT; None: not reported yet
        self._main_stack: Stack = ()  # of the main thread
        self._answers_questions = False
        self._num_refused = 0  # lines on its channel
        self._groups: tuple[Group, ...] | None = None
        self._progress: Progress | None = None
        self._awaits_groups = False
        self._awaits_stacks = False
        self._grew_at = 0.0  # the text

    def read(self) -> bool:
        """Read what has come, up to a limit; return whether it shows progress."""
        if self.code is not None:
            return False
        sent = self._read_available(self.fds[0])
        written = self._read_available(self.fds[1])
        if written:
            self.text += written.decode(errors="replace")
            self._grew_at = time.monotonic()
        shows_progress = False
        if self._num_refused < _MAX_REFUSED:  # else still read: the rank must not wait for it
            for record in self._reader.read(sent):
                shows_progress |= self._take_in(record)
                if self._num_refused == _MAX_REFUSED:
                    break
        return shows_progress

    def _read_available(self, fd: int) -> bytes:
        """Return what is in a pipe or socket, up to a limit, without waiting for more."""
        parts: list[bytes] = []
        with suppress(BlockingIOError, ConnectionResetError):
            for _ in range(_MAX_READ // _READ_SIZE):
                part = os.read(fd, _READ_SIZE)
                if not part:
                    self.closed.add(fd)
                    break
                parts.append(part)
        return b"".join(parts)

    def _take_in(self, record: Record | Refused) -> bool:
        """Keep what a record says; return whether it shows progress."""
        if isinstance(record, Refused):
            self._num_refused += 1
            if self._num_refused == 1:
                say(
                    f"note: rank {self._rank} wrote to the launcher's status channel; ignored, "
                    f"as it is not a record: {record.reason}"
                )
            return False
        if isinstance(record, Ready):
            self._shows_stacks = True
        elif isinstance(record, AnswersQuestions):
            self._answers_questions = True
        elif isinstance(record, Heartbeat):
            self._progress = record.progress
            return True
        elif isinstance(record, Answer):
            self._shows_stacks, self._main_stack = record.shows_stacks, record.main_stack
            if record.progress != Progress():  # the script uses an Accelerator
                self._progress = record.progress
            return self._note_groups(record.groups)
        elif isinstance(record, (Crash, End)):
            self.ends.append(record)
            return self._note_groups(record.groups)
        return False

    def _note_groups(self, groups: tuple[Group, ...]) -> bool:
        """Keep a rank's groups; return whether they have changed."""
        before, self._groups = self._groups, groups
        self._awaits_groups = False
        return groups != before

    def ask_for_groups(self) -> None:
        if self.code is None and self._answers_questions and not self._awaits_groups:
            with suppress(OSError):
                os.write(self.fds[0], b"?")
                self._awaits_groups = True

    def ask_for_stacks(self) -> None:
        if self.code is None:
            self.text = ""
            self._awaits_stacks = bool(self._shows_stacks) and handles_quit(self._pid)
            if self._awaits_stacks:
                with suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGQUIT)

    @property
    def owes_an_answer(self) -> bool:
        if self.code is not None:
            return False
        is_quiet = self.text and time.monotonic() - self._grew_at > _QUIET_S
        has_stacks = is_quiet or is_complete(self.text)
        return self._awaits_groups or (self._awaits_stacks and not has_stacks)

    @property
    def status(self) -> RankStatus:
        status = RankStatus(self._rank, groups=self._groups, progress=self._progress)
        stacks = parse_stacks(self.text) if self.code is None else ()
        if self.code is None and (waits_for_threads(stacks) or not self._is_ending):
            if is_truncated(self.text):
                stacks = (without_launcher_frames(self._main_stack), *stacks)
            return status._replace(stacks=stacks, no_stack=self._no_stack)
        crash = next((one for one in self.ends if isinstance(one, Crash)), None)
        if crash is None:
            return status._replace(exit=self._exit)
        return status._replace(
            stacks=(parse_traceback(crash.traceback),),
            groups=self._groups and tuple(map(_before_crash, self._groups)),
        )

    @property
    def _no_stack(self) -> NoStack | None:
        if self._shows_stacks is None:
            return NoStack.NOT_PYTHON
        if not self._shows_stacks or not handles_quit(self._pid):
            return NoStack.SIGQUIT_IN_USE
        is_stopped = _status_of(self._pid).get(STATE, "").startswith(STOPPED_STATES)
        return NoStack.STOPPED if is_stopped else None

    @property
    def _is_ending(self) -> bool:
        """Return whether the script has ended and its process has not, and no collective is open.

        Threads of the script may still be in one.
        """
        waits = any(group.waits_for is not None for group in self._groups or ())
        return not waits and any(isinstance(one, End) for one in self.ends)

    @property
    def _exit(self) -> Exit:
        end = next((one for one in self.ends if isinstance(one, End)), None)
        if end is None:
            return Exit(self.code or 0)
        return Exit(end.code if self.code is None else self.code, True, end.exited_at)


def _before_crash(group: Group) -> Group:
    """Return a group as it was before: torch marks a collective that failed as done."""
    return group._replace(
        collectives=tuple(one._replace(is_done=False) for one in group.collectives[-1:])
    )


def handles_quit(pid: int) -> bool:
    """Return whether a process has a handler for SIGQUIT, which ends it otherwise.

    Known on Linux only; elsewhere the answer is yes.
    """
    if sys.platform != "linux":
        return True
    return bool(int(_status_of(pid).get(CAUGHT_SIGNALS, "0"), 16) >> (signal.SIGQUIT - 1) & 1)


def _status_of(pid: int) -> dict[str, str]:
    """Return the rows of /proc/PID/status; none where the process is gone, or without Linux."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            rows = [line.split(":", 1) for line in file]
    except OSError:
        return {}
    return {row[0]: row[1].strip() for row in rows}


def stack_pipe(pid: int) -> str:
    """Return the pipe through which `headway stack` gets what the launcher `pid` prints."""
    return os.path.join(tempfile.gettempdir(), f"headway-stack-{pid}", "report")


def say(text: str) -> None:
    """Print a line on stderr, and into the pipe of a `headway stack` that waits for it."""
    line = f"headway: {text}\n"
    with suppress(OSError, RuntimeError):  # in a signal's handler, amid another such line
        sys.stderr.write(line)
        sys.stderr.flush()
    with suppress(OSError):
        path = stack_pipe(os.getpid())
        found = os.lstat(path)
        if stat.S_ISFIFO(found.st_mode) and found.st_uid == os.getuid():
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            os.set_blocking(fd, True)
            with open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line)
