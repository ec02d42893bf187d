"""Listens to what the ranks say about themselves, and asks them when the run seems to hang."""

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
from typing import Any

from headway.contract.records import Progress, decode_records
from headway.launcher.reporting import hang
from headway.launcher.reporting.hang import Group, Hang, Statement
from headway.launcher.reporting.stacks import (
    Frame,
    Stack,
    describe_crash,
    is_cut,
    is_whole,
    parse_stacks,
    parse_traceback,
    the_scripts_own,
    waits_for_threads,
)

_ANSWER_WITHIN_S = 1.0  # to the question for collectives, and then to that for stacks
_AWAY_S = 1.0  # who waits so much longer than asked to was stopped, and so may the ranks have been
_QUIET_S = 0.5  # stacks that have not grown for so long are whole, whatever they end with
_POLL_S = 0.02
_ASK_EVERY_S = 10.0  # at most, for the collectives of ranks under `hang_timeout`


class Watch:
    """One thread that reads the ranks' status channels and stacks until `close`.

    Args:
        hang_timeout_s: without progress for so long the run counts as hanging; None: for ever.
        heard_at: says when a rank last wrote any output, on the monotonic clock.
    """

    def __init__(self, hang_timeout_s: int | None, heard_at: Callable[[], float]) -> None:
        self.hang: Hang | None = None  # set once, when `hang_timeout_s` is over
        self._timeout_s = hang_timeout_s
        self._heard_at = heard_at
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
        """Listen to a new rank's channel and pipe of stacks; both are closed in the end."""
        with self._lock:
            self._ranks[rank] = _Rank(rank, pid, channel, stacks)
            self._progress_at = time.monotonic()
            for fd in (channel, stacks):
                os.set_blocking(fd, False)
                self._selector.register(fd, selectors.EVENT_READ)
        self._wake()

    def end(self, rank: int, code: int) -> list[dict[str, Any]]:
        """Stop listening to a rank whose process has ended; return how it said that it would.

        What it has said about its collectives stays, to be compared with the others'.
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
            return ended.last_words

    def crash_stack(self, rank: int) -> list[str]:
        """Return where the process of a rank crashed, as far as faulthandler could tell."""
        known = self._ranks.get(rank)
        return describe_crash(known.text) if known else []

    def begin_to_stop(self) -> None:
        """Ranks that are being stopped make no progress, and need none."""
        self._is_stopping = True

    def ask(self) -> None:
        """Have all ranks' stacks printed; may be called from a signal handler."""
        self._is_asked = True
        self._wake()

    def statements(self) -> list[Statement]:
        """Ask the living ranks where they are, and return what is known of all of this machine's.

        Takes up to two seconds, if a rank cannot answer.
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
            return [one.statement for one in ranks]

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
        with suppress(KeyError):  # it was closed by the rank before
            self._selector.unregister(fd)

    def _listen(self) -> None:
        every_s = None if self._timeout_s is None else min(self._timeout_s / 4, _ASK_EVERY_S)
        while not self._is_closing:
            began = time.monotonic()
            ready = self._selector.select(every_s)
            if every_s is not None and time.monotonic() > began + every_s + _AWAY_S:
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
        statements = self.statements()
        say(f"stacks of {len(statements)} ranks\n{hang.describe(statements)}")

    def _look_for_a_hang(self) -> None:
        if self._timeout_s is None or self.hang is not None or not self._ranks:
            return
        if not self._has_stood_still(self._timeout_s):
            return
        statements = self.statements()
        if self._has_stood_still(self._timeout_s):  # also while it was asked
            say(f"no progress for {self._timeout_s} s{hang.describe_stacks(statements)}")
            self.hang = Hang(tuple(statements), self._timeout_s)

    def _has_stood_still(self, for_s: float) -> bool:
        since = max(self._progress_at, self._heard_at())
        return not self._is_stopping and time.monotonic() - since >= for_s


class _Rank:
    """One rank, as far as it has spoken."""

    def __init__(self, rank: int, pid: int, channel: int, stacks: int) -> None:
        self.fds = (channel, stacks)
        self.closed: set[int] = set()  # of these, by the rank
        self.code: int | None = None  # of its process, once that has ended
        self.last_words: list[dict[str, Any]] = []  # its crash, or its end
        self.text = ""  # what faulthandler wrote
        self._rank = rank
        self._pid = pid
        self._rest = b""
        self._shows_stacks: bool | None = None  # None: it has not said so
        self._main: Stack = ()  # the main thread's calls
        self._answers = False
        self._groups: tuple[Group, ...] | None = None
        self._progress: Progress | None = None
        self._awaits_groups = False
        self._awaits_stacks = False
        self._grew_at = 0.0  # the text

    def read(self) -> bool:
        """Take what has come; True where that is progress."""
        if self.code is not None:
            return False
        lines = self._rest + self._take(self.fds[0])
        written = self._take(self.fds[1])
        if written:
            self.text += written.decode(errors="replace")
            self._grew_at = time.monotonic()
        records, self._rest = decode_records(lines)
        signs = [self._is_progress(record) for record in records]
        return any(signs)

    def _take(self, fd: int) -> bytes:
        """Return what stands in a pipe or socket, without waiting for more."""
        data = b""
        with suppress(BlockingIOError, ConnectionResetError):
            while part := os.read(fd, 65536):
                data += part
            self.closed.add(fd)
        return data

    def _is_progress(self, record: dict[str, Any]) -> bool:
        """Note what a record says."""
        self._shows_stacks = record.get("shows_stacks", self._shows_stacks)
        self._main = tuple(Frame(*call) for call in record.get("main", self._main))
        self._answers |= "answers" in record
        if "crash" in record or "end" in record:
            self.last_words.append(record)
        if tuple(record.get("progress", Progress())) != Progress():
            self._progress = Progress(*record["progress"])
        groups_before = self._groups
        if "groups" in record:
            self._groups = tuple(Group.read(one) for one in record["groups"])
            self._awaits_groups = False
        return "beat" in record or self._groups != groups_before

    def ask_for_groups(self) -> None:
        if self.code is None and self._answers and not self._awaits_groups:
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
        has_stacks = is_quiet or is_whole(self.text)
        return self._awaits_groups or (self._awaits_stacks and not has_stacks)

    @property
    def statement(self) -> Statement:
        told = Statement(self._rank, groups=self._groups, progress=self._progress)
        stacks = parse_stacks(self.text) if self.code is None else ()
        if self.code is None and (waits_for_threads(stacks) or not self._is_leaving):
            if is_cut(self.text):
                stacks = (the_scripts_own(self._main), *stacks)
            return told._replace(stacks=stacks, silence=self._silence)
        crashes = [record["crash"] for record in self.last_words if "crash" in record]
        if not crashes:
            return told._replace(end=self._end)
        return told._replace(
            stacks=(parse_traceback(crashes[0]["traceback"]),),
            groups=self._groups and tuple(group.after_crash() for group in self._groups),
        )

    @property
    def _silence(self) -> str:
        if self._shows_stacks is None:
            return "the program is no Python, or has only just begun"
        if not self._shows_stacks or not handles_quit(self._pid):
            return "the script handles SIGQUIT itself"
        is_stopped = _status_of(self._pid).get("State", "").startswith(("T", "t"))
        return "its process is stopped" if is_stopped else ""

    @property
    def _is_leaving(self) -> bool:
        """True where its script is at its end and the process is not, and it waits for nobody."""
        waits = any(group.waits_for is not None for group in self._groups or ())
        return not waits and any("end" in record for record in self.last_words)

    @property
    def _end(self) -> str:
        place = "".join(record.get("place", "") for record in self.last_words)
        codes = [record["code"] for record in self.last_words if "end" in record]
        code = codes[0] if self.code is None else self.code
        return f"exit code {code}{place and ', '}{place}"


def handles_quit(pid: int) -> bool:
    """Return whether a process has a handler for SIGQUIT, which ends it otherwise.

    Source: proc(5), SigCgt in /proc/pid/status. Elsewhere than on Linux the answer is yes.
    """
    if sys.platform != "linux":
        return True
    return bool(int(_status_of(pid).get("SigCgt", "0"), 16) >> (signal.SIGQUIT - 1) & 1)


def _status_of(pid: int) -> dict[str, str]:
    """Return what Linux tells of a process; nothing where it is gone, and elsewhere."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            rows = [line.split(":", 1) for line in file]
    except OSError:
        return {}
    return {row[0]: row[1].strip() for row in rows}


def mailbox(pid: int) -> str:
    """Return the pipe through which `headway stack` gets what the launcher `pid` prints."""
    return os.path.join(tempfile.gettempdir(), f"headway-stack-{pid}", "report")


def say(text: str) -> None:
    """Print, and hand a copy to whoever asked from another terminal."""
    line = f"headway: {text}\n"
    with suppress(OSError):
        sys.stderr.write(line)
        sys.stderr.flush()
    with suppress(OSError):
        box = mailbox(os.getpid())
        found = os.lstat(box)
        if stat.S_ISFIFO(found.st_mode) and found.st_uid == os.getuid():
            fd = os.open(box, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            os.set_blocking(fd, True)
            with open(fd, "w", encoding="utf-8") as file:
                file.write(line)
