"""Writes to the launcher's stdout and stderr, each in a dedicated thread, and draws the footer.

Only the writing threads may block on a slow reader, because `Sink.show` only adds to a queue. The
ranks' pipes are read only while `is_full` is false. Otherwise, the pipes fill and the ranks block,
as they would without a launcher. A queue contains at most `MAX_QUEUED` bytes plus one block.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections.abc import Callable

MAX_QUEUED = 2**20  # bytes; above this limit, the ranks wait
_REDRAW_S = 0.05  # the minimum time between two redraws of the footer
_NEVER = float("inf")
_MAX_WRITE = 2**16  # bytes; small enough to distinguish a slow reader from a stopped one
_REDRAWN = re.compile(rb"\r(?!\n|$)")
_COLORS = re.compile(rb"\x1b\[[0-9;]*[mK]")
_MAX_LINE = 4096  # bytes of an unfinished line that are examined
_SAVE, _RESTORE = b"\x1b7", b"\x1b8"
_TO_NEXT_LINE = b"\x1b[B\r"
_MAKE_ROOM = b"\x1bD\x1b[A"  # scrolls if the cursor is in the last line
_ERASE = b"\x1b[J"  # to the end of the screen, including wrapped text

Owner = tuple[int, int]
"""A rank, and 1 for stdout or 2 for stderr."""


class Sink:
    """A stream of the launcher, or two streams that write to the same file.

    The writing thread calls `on_change` when a full queue has space again, and when the stream
    fails.
    """

    def __init__(self, fd: int, is_terminal: bool, on_change: Callable[[], None]) -> None:
        self.is_terminal = is_terminal
        self.error: OSError | None = None  # set when the stream fails
        self.owner: Owner | None = None  # of an unfinished last line
        self._fd = fd
        self._on_change = on_change
        self._changed = threading.Condition()
        self._queue: list[bytes] = []
        self._size = 0  # unwritten bytes
        self._progress_at = 0.0  # when the last byte was accepted or the first byte was queued
        self._is_discarding = False
        self._footer = Footer(fd) if is_terminal else None
        self._redraw_at = _NEVER  # when to redraw the footer, on the monotonic clock
        self._drawn_at = 0.0
        self._thread = threading.Thread(target=self._run, name="headway-sink", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether the ranks must wait for the reader."""
        return self._size >= MAX_QUEUED

    @property
    def blocked_since(self) -> float | None:
        """The monotonic time at which a byte was last accepted; None if the queue is empty."""
        with self._changed:
            return self._progress_at if self._size else None

    def show(self, owner: Owner, text: bytes, prefix: bytes, *, is_new: bool = False) -> None:
        """Queue lines; the last may be unfinished. `is_new` ends the previous line first."""
        with self._changed:
            before = self.owner
            continues = before == owner and not is_new
            if prefix:
                text = _add_prefixes(text, prefix, continues)
            if before is not None and not continues and (prefix or is_new or before[0] != owner[0]):
                text = b"\n" + text
            self.owner = None if text.endswith(b"\n") else owner
            self.forward(text)

    def forward(self, data: bytes) -> None:
        """Queue bytes that are written unchanged."""
        with self._changed:
            if self._is_discarding or not data:
                return
            if not self._size:
                self._progress_at = time.monotonic()
            self._queue.append(data)
            self._size += len(data)
            self._changed.notify_all()

    def log(self, text: str) -> None:
        """Queue text from the launcher; if the last line is unfinished, end that line first."""
        data = text.encode(errors="backslashreplace")
        with self._changed:
            if self._size < 2 * MAX_QUEUED:
                self.end_line()
                self.forward(data)

    def show_footer(self, text: str) -> None:
        """Show or replace the line below all output on a terminal; an empty string removes it."""
        with self._changed:
            if self._footer is not None:
                self._footer.text = text
                self._redraw_at = 0.0
                self._changed.notify_all()

    def end_line(self) -> None:
        with self._changed:
            if self.owner is not None:
                self.forward(b"\n")
                self.owner = None

    def wait(self, until: float) -> bool:
        """Wait until the queue is empty, or until the time `until`; return whether it is empty."""
        with self._changed:
            while self._size or (self._footer is not None and self._footer.is_unfinished):
                left_s = until - time.monotonic()
                if left_s <= 0 or not self._changed.wait(min(left_s, threading.TIMEOUT_MAX)):
                    return False
        return True

    def discard(self, error: OSError | None = None) -> int:
        """Discard all queued and future output; return the number of queued bytes."""
        with self._changed:
            lost = self._size
            self._is_discarding = True
            self.error = error
            self._queue.clear()
            self._size = 0
            self._changed.notify_all()
        return lost

    def close(self) -> None:
        """Stop the thread; unless `discard` was called, wait until the thread has exited."""
        with self._changed:
            is_blocked, self._is_discarding = self._is_discarding, True
            self._changed.notify_all()
        if not is_blocked:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._is_discarding or self._wait_s() == 0):
                    self._changed.wait(self._wait_s())
                if self._is_discarding:
                    return
                output = b"".join(self._queue)
                data = memoryview(output)
                self._queue.clear()
            try:
                if self._footer is not None:
                    self._write_uncounted(self._footer.erase())
                while data and not self._is_discarding:
                    data = data[self._write(data[:_MAX_WRITE]) :]
                if self._footer is not None:
                    self._draw_footer(self._footer, output)
            except OSError as error:
                self.discard(error)
                self._on_change()

    def _wait_s(self) -> float | None:
        """Return the time until the footer is redrawn, or None if no redraw is scheduled."""
        if self._redraw_at == _NEVER:
            return None
        return min(max(self._redraw_at - time.monotonic(), 0.0), threading.TIMEOUT_MAX)

    def _draw_footer(self, footer: Footer, output: bytes) -> None:
        """Redraw the footer now, or later if it was just redrawn."""
        footer.note(output)
        now, may_at = time.monotonic(), self._drawn_at + _REDRAW_S
        with self._changed:
            is_late = not footer.text or now >= may_at
            self._redraw_at = _NEVER if is_late else may_at
            drawing = footer.draw() if is_late else b""
            self._changed.notify_all()  # `wait` may be waiting for the footer's removal
        if drawing:
            self._drawn_at = now
            self._write_uncounted(drawing)

    def _write_uncounted(self, data: bytes) -> None:
        """Write the footer without counting its bytes in `_size`."""
        rest = memoryview(data)
        while rest:
            rest = rest[write_some(self._fd, rest) :]

    def _write(self, data: memoryview) -> int:
        written = write_some(self._fd, data)
        if not written:
            return 0
        with self._changed:
            if self._is_discarding:
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
    """Write once when the stream is writable; return the number of written bytes, possibly 0."""
    try:
        return os.write(fd, data)
    except BlockingIOError:  # another program made the shared stream non-blocking
        select.select([], [fd], [])
        return 0


def _add_prefixes(text: bytes, prefix: bytes, continues: bool) -> bytes:
    """Add the prefix to each line and to each redrawn state of a progress bar."""
    text = text[:-1].replace(b"\n", b"\n" + prefix) + text[-1:]
    if b"\r" in text:
        if not continues and not text.startswith(b"\r\n"):
            text = text.removeprefix(b"\r")
        text = _REDRAWN.sub(b"\r" + prefix, text)
    return text if continues else prefix + text


class Footer:
    """The line below all output on a terminal; its methods return the bytes that draw or erase it.

    The line is shown only while the run is in the terminal's foreground, and while the cursor is at
    the start of a line or after a progress bar. It is not shown after a prompt.
    """

    def __init__(self, fd: int) -> None:
        self.text = ""  # empty: show nothing
        self._fd = fd
        self._rest = b""  # the end of the unfinished line
        self._to_erase = b""  # empty unless the footer is drawn

    @property
    def is_unfinished(self) -> bool:
        """Whether the footer must still be erased."""
        return bool(self._to_erase) and not self.text

    def erase(self) -> bytes:
        """Return the bytes that erase the footer before other output; empty if it is not drawn."""
        bytes_, self._to_erase = self._to_erase, b""
        return bytes_

    def note(self, written: bytes | memoryview) -> None:
        self._rest = (self._rest + bytes(written)).rpartition(b"\n")[2][-_MAX_LINE:]

    def draw(self) -> bytes:
        """Return the bytes that draw the footer after `erase`; empty if it cannot be shown now."""
        rest = _COLORS.sub(b"", self._rest)
        is_bar = b"\r" in rest and b"\x1b" not in rest
        if not self.text or not (is_bar or not rest) or not self._is_in_foreground():
            return b""
        try:
            columns = os.get_terminal_size(self._fd).columns
        except OSError:  # the terminal was closed
            return b""
        text = _shorten(self.text, max(columns - 1, 0)).encode("ascii", "replace")
        if is_bar:
            self._to_erase = _SAVE + _TO_NEXT_LINE + _ERASE + _RESTORE
            return _MAKE_ROOM + _SAVE + _TO_NEXT_LINE + text + _RESTORE
        self._to_erase = b"\r" + _ERASE
        return text + b"\r"

    def _is_in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:  # not this process's controlling terminal
            return False


def _shorten(text: str, columns: int) -> str:
    """Remove parts between the first and the last part until the text fits."""
    parts = text.split("  ")
    while len(text) > columns and len(parts) > 2:
        del parts[1]
        text = "  ".join(parts)
    return text[:columns]
