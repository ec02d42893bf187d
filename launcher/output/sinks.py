"""The launcher's stdout and stderr, each written by a dedicated thread, and a footer line.

Writing may block for as long as a reader likes; nothing else may. `Sink.show` only adds to a queue,
and whoever reads the ranks' pipes asks `is_full` first: the pipes fill, and the ranks wait, as they
would for their own reader. A queue holds at most `MAX_QUEUED` bytes and one block.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections.abc import Callable
from typing import TextIO

MAX_QUEUED = 2**20  # bytes; with more, the ranks wait
_REDRAW_S = 0.05  # the footer is drawn again after output no more often
_NEVER = float("inf")
_MAX_WRITE = 2**16  # bytes per write, which distinguishes a slow reader from a stopped one
_REDRAWN = re.compile(rb"\r(?!\n|$)")
_COLORS = re.compile(rb"\x1b\[[0-9;]*[mK]")
_MAX_LINE = 4096  # bytes of an unfinished line that are looked at
_SAVE, _RESTORE = b"\x1b7", b"\x1b8"
_TO_NEXT_LINE = b"\x1b[B\r"
_MAKE_ROOM = b"\x1bD\x1b[A"  # scrolls where the cursor is in the last line, and comes back
_ERASE = b"\x1b[J"  # from the cursor on, also what a narrower terminal has wrapped

Owner = tuple[int, int]
"""A rank, and 1 or 2 for its stdout or stderr."""


class Sink:
    """One stream of the launcher, or two that are the same file.

    `on_change` is called, in the writing thread, when a full queue has room again, and when the
    stream can no longer be written to.
    """

    def __init__(self, fd: int, is_terminal: bool, on_change: Callable[[], None]) -> None:
        self.is_terminal = is_terminal
        self.error: OSError | None = None  # why it can no longer be written to
        self.owner: Owner | None = None  # of the unfinished line that was shown last
        self._fd = fd
        self._on_change = on_change
        self._changed = threading.Condition()
        self._queue: list[bytes] = []
        self._size = 0  # bytes queued, and not yet written
        self._progress_at = 0.0  # the last byte was accepted, or the first one queued
        self._is_abandoned = False
        self._footer = Footer(fd) if is_terminal else None
        self._redraw_at = _NEVER  # the footer, on the monotonic clock
        self._drawn_at = 0.0
        self._thread = threading.Thread(target=self._run, name="headway-sink", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether the ranks must wait."""
        return self._size >= MAX_QUEUED

    @property
    def blocked_since(self) -> float | None:
        """When the stream last accepted a byte, on the monotonic clock; None: nothing waits."""
        with self._changed:
            return self._progress_at if self._size else None

    def show(self, owner: Owner, text: bytes, prefix: bytes, *, is_new: bool = False) -> None:
        """Queue lines; the last may be unfinished; `is_new` first ends an unfinished one."""
        with self._changed:
            before = self.owner
            continues = before == owner and not is_new
            if prefix:
                text = _prefixed(text, prefix, continues)
            if before is not None and not continues and (prefix or is_new or before[0] != owner[0]):
                text = b"\n" + text
            self.owner = None if text.endswith(b"\n") else owner
            self._add(text)

    def forward(self, data: bytes) -> None:
        with self._changed:
            self._add(data)

    def log(self, text: str) -> None:
        """Queue a text of the launcher's own; an unfinished line is ended before it."""
        data = text.encode(errors="backslashreplace")
        with self._changed:
            if self._size < 2 * MAX_QUEUED:
                self._end_line()
                self._add(data)

    def show_footer(self, text: str) -> None:
        """Show a line below all else on the terminal, until the next one; empty: none."""
        with self._changed:
            if self._footer is not None:
                self._footer.text = text
                self._redraw_at = 0.0
                self._changed.notify_all()

    def end_line(self) -> None:
        with self._changed:
            self._end_line()

    def _end_line(self) -> None:
        if self.owner is not None:
            self._add(b"\n")
            self.owner = None

    def wait(self, until: float) -> bool:
        """Wait until all has been written; False if that is not so at `until` (monotonic clock)."""
        with self._changed:
            while self._size or (self._footer is not None and self._footer.is_unfinished):
                left_s = until - time.monotonic()
                if left_s <= 0 or not self._changed.wait(min(left_s, threading.TIMEOUT_MAX)):
                    return False
        return True

    def abandon(self, error: OSError | None = None) -> int:
        """Discard what is queued and what will be; return how many bytes were queued."""
        with self._changed:
            lost = self._size
            self._is_abandoned = True
            self.error = error
            self._queue.clear()
            self._size = 0
            self._changed.notify_all()
        return lost

    def close(self) -> None:
        """End the thread, after `wait`; one that `abandon` left in a blocked write stays there."""
        with self._changed:
            is_blocked, self._is_abandoned = self._is_abandoned, True
            self._changed.notify_all()
        if not is_blocked:
            self._thread.join()

    def _add(self, data: bytes) -> None:
        if self._is_abandoned or not data:
            return
        if not self._size:
            self._progress_at = time.monotonic()
        self._queue.append(data)
        self._size += len(data)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._is_abandoned or self._wait_s() == 0):
                    self._changed.wait(self._wait_s())
                if self._is_abandoned:
                    return
                output = b"".join(self._queue)
                data = memoryview(output)
                self._queue.clear()
            try:
                if self._footer is not None:
                    self._write_uncounted(self._footer.erase())
                while data and not self._is_abandoned:
                    data = data[self._write(data[:_MAX_WRITE]) :]
                if self._footer is not None:
                    self._draw_footer(self._footer, output)
            except OSError as error:
                self.abandon(error)
                self._on_change()

    def _wait_s(self) -> float | None:
        """Return how long there is nothing to do for the footer; None: for ever."""
        if self._redraw_at == _NEVER:
            return None
        return min(max(self._redraw_at - time.monotonic(), 0.0), threading.TIMEOUT_MAX)

    def _draw_footer(self, footer: Footer, output: bytes) -> None:
        """Draw the footer again, at once unless that was just done."""
        footer.note(output)
        now, may_at = time.monotonic(), self._drawn_at + _REDRAW_S
        with self._changed:
            is_late = not footer.text or now >= may_at
            self._redraw_at = _NEVER if is_late else may_at
            drawing = footer.draw() if is_late else b""
            self._changed.notify_all()  # it may have been taken away for good
        if drawing:
            self._drawn_at = now
            self._write_uncounted(drawing)

    def _write_uncounted(self, data: bytes) -> None:
        """Write what is not counted: the footer."""
        rest = memoryview(data)
        while rest:
            rest = rest[write_some(self._fd, rest) :]

    def _write(self, data: memoryview) -> int:
        written = write_some(self._fd, data)
        if not written:
            return 0
        with self._changed:
            if self._is_abandoned:
                return written
            was_full = self.is_full
            self._size -= written
            self._progress_at = time.monotonic()
            if not self._size:
                self._changed.notify_all()
        if was_full and not self.is_full:
            self._on_change()
        return written


def write_some(fd: int, data: bytes | memoryview) -> int:
    """Write once, when the stream takes something; return how much was taken, which may be 0."""
    try:
        return os.write(fd, data)
    except BlockingIOError:  # a program that shares the stream has made it non-blocking
        select.select([], [fd], [])
        return 0


def _prefixed(text: bytes, prefix: bytes, continues: bool) -> bytes:
    """Put `prefix` before each line, and before each redrawn state of a progress bar."""
    text = text[:-1].replace(b"\n", b"\n" + prefix) + text[-1:]
    if b"\r" in text:
        if not continues and not text.startswith(b"\r\n"):
            text = text.removeprefix(b"\r")
        text = _REDRAWN.sub(b"\r" + prefix, text)
    return text if continues else prefix + text


def is_same_file(one: TextIO, other: TextIO) -> bool:
    first, second = os.fstat(one.fileno()), os.fstat(other.fileno())
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


class Footer:
    """A line below all that a terminal shows: the bytes that draw it, and that take it away again.

    It is there only while the cursor is where a line begins, or behind a progress bar, which stays
    in place; a prompt has the terminal for itself. So does a shell, while the run is in the
    background.
    """

    def __init__(self, fd: int) -> None:
        self.text = ""  # empty: show nothing
        self._fd = fd
        self._rest = b""  # of the unfinished line
        self._to_erase = b""  # while it is drawn

    @property
    def is_unfinished(self) -> bool:
        """Whether it is drawn and should not be."""
        return bool(self._to_erase) and not self.text

    def erase(self) -> bytes:
        """Return what takes it away, before something is written; empty if it is not there."""
        bytes_, self._to_erase = self._to_erase, b""
        return bytes_

    def note(self, written: bytes | memoryview) -> None:
        self._rest = (self._rest + bytes(written)).rpartition(b"\n")[2][-_MAX_LINE:]

    def draw(self) -> bytes:
        """Return what draws it, after `erase`; empty where it has no place now."""
        rest = _COLORS.sub(b"", self._rest)
        is_bar = b"\r" in rest and b"\x1b" not in rest
        if not self.text or not (is_bar or not rest) or not self._is_in_foreground():
            return b""
        try:
            columns = os.get_terminal_size(self._fd).columns
        except OSError:  # it has been closed
            return b""
        text = _fit(self.text, max(columns - 1, 0)).encode("ascii", "replace")
        if is_bar:
            self._to_erase = _SAVE + _TO_NEXT_LINE + _ERASE + _RESTORE
            return _MAKE_ROOM + _SAVE + _TO_NEXT_LINE + text + _RESTORE
        self._to_erase = b"\r" + _ERASE
        return text + b"\r"

    def _is_in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:  # it is not the terminal that controls this process
            return False


def _fit(text: str, columns: int) -> str:
    """Skip parts between the first and the last one, in their order, until the text fits."""
    parts = text.split("  ")
    while len(text) > columns and len(parts) > 2:
        del parts[1]
        text = "  ".join(parts)
    return text[:columns]
