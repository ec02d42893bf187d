"""The ranks' output: read from pipes as it comes, written line by line with the rank in front.

One thread waits for all pipes at once; nothing is polled. On a terminal a progress bar stays a bar:
a carriage return ends a piece too, and a piece that stands still is shown before its line is done.
"""

from __future__ import annotations

import errno
import io
import os
import re
import select
import selectors
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TextIO

_IDLE_S = 0.1  # an unfinished line is shown on a terminal after this
_DRAIN_S = 1.0  # what a dead rank's grandchildren may still write is waited for no longer
_TAIL_LINES = 40  # of a rank, kept for the report of its failure
_LONGEST = 2**20  # bytes of one line that are kept together


class Output:
    """Reads the ranks' pipes until they close; `close` waits for the rest and ends the thread.

    Args:
        prefixed: put `[rank] ` before each line.
        folder: keep a copy in `folder/rank_R_attempt_A.log`, without the prefix.
    """

    def __init__(self, *, prefixed: bool, folder: str | None) -> None:
        self._prefixed = prefixed
        self._folder = folder
        self._consoles = {1: _Console(sys.stdout), 2: _Console(sys.stderr)}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._added: list[_Stream] = []
        self._tails: dict[int, deque[bytes]] = {}
        self._deadline: float | None = None
        self.heard_at = 0.0  # when a rank last wrote anything, on the monotonic clock
        self._thread = threading.Thread(target=self._pump, name="headway-output", daemon=True)
        self._thread.start()

    def add(self, rank: int, attempt: int, pipes: dict[int, int]) -> None:
        """Read a new rank's pipes, {1: fd of stdout, 2: fd of stderr}; closes them in the end."""
        log = None
        if self._folder is not None:
            path = os.path.join(self._folder, f"rank_{rank}_attempt_{attempt}.log")
            log = _Log(open(path, "wb", buffering=0), len(pipes))  # noqa: SIM115  closed with its last stream
        prefix = f"[{rank}] ".encode() if self._prefixed else b""
        tail = self._tails[rank] = deque(maxlen=_TAIL_LINES)
        for target, fd in pipes.items():
            self._added.append(_Stream(fd, prefix, self._consoles[target], log, tail))
        self._wake()

    def tail(self, rank: int) -> list[str]:
        """Return the last lines of a rank's stderr and stdout; complete after `close`."""
        return [line.decode(errors="replace") for line in self._tails.get(rank, ())]

    @property
    def has_lost_output(self) -> bool:
        """True when something could not be written, to a full disk for one."""
        return any(console.has_lost_output for console in self._consoles.values())

    def close(self) -> None:
        """Write what is left and stop reading."""
        self._deadline = time.monotonic() + _DRAIN_S
        self._wake()
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._selector.close()

    def _wake(self) -> None:
        os.write(self._wake_write, b"\0")

    def _pump(self) -> None:
        streams: set[_Stream] = set()
        while self._deadline is None or (streams and time.monotonic() < self._deadline):
            waiting = any(stream.is_unfinished for stream in streams)
            timeout = _IDLE_S if waiting or self._deadline is not None else None
            ready = self._selector.select(timeout)
            for key, _ in ready:
                if key.data is None:
                    os.read(self._wake_read, 4096)
                    continue
                self.heard_at = time.monotonic()
                if not key.data.read():
                    self._selector.unregister(key.fd)
                    streams.discard(key.data)
                    key.data.finish()
            while self._added:
                stream = self._added.pop()
                self._selector.register(stream.fd, selectors.EVENT_READ, stream)
                streams.add(stream)
            if not ready:
                for stream in streams:
                    stream.show_unfinished()
        for stream in streams:
            stream.read_rest()
            stream.finish()


class _Log:
    """One rank's file, shared by its two streams."""

    def __init__(self, file: io.FileIO, users: int) -> None:
        self._file = file
        self._users = users
        self._is_full = False

    def write(self, data: bytes) -> None:
        if self._is_full:
            return
        try:
            _write_all(self._file.fileno(), data)
        except OSError as error:
            self._is_full = True
            _complain(f"{self._file.name} is cut short: {error.strerror}")

    def release(self) -> None:
        self._users -= 1
        if not self._users:
            self._file.close()


class _Console:
    """One of the launcher's own streams; knows whose unfinished line the cursor stands in."""

    def __init__(self, stream: TextIO) -> None:
        stream.flush()
        self._fd = stream.fileno()
        self.is_terminal = stream.isatty()
        self._open: object = None
        self.is_closed = False
        self.has_no_reader = False  # then the ranks hear of it, as they would without a launcher
        self.has_lost_output = False

    def write(self, owner: object, piece: bytes, prefix: bytes) -> None:
        if self.is_closed:
            return
        is_new_line = self._open is not owner
        lead = b"\n" if is_new_line and self._open is not None else b""
        if is_new_line:
            piece = prefix + piece.removeprefix(b"\r")
        if prefix:  # a bar is drawn anew from the line's beginning
            piece = re.sub(rb"\r(?!\n|$)", b"\r" + prefix, piece)
        piece = lead + piece
        self._open = None if piece.endswith(b"\n") else owner
        try:
            _write_all(self._fd, piece)
        except BrokenPipeError:
            self.has_no_reader = True
            self._give_up()
        except OSError as error:
            self._give_up()
            _complain(f"the ranks' output could not be written: {error.strerror}; it is lost")
            self.has_lost_output = True

    def _give_up(self) -> None:
        """Write nowhere from now on; what Python still holds for this stream may go there too."""
        self.is_closed = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._fd)
        os.close(nowhere)


def _write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, also where the other end takes it in parts or is set not to block."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select([], [fd], [])


def _complain(line: str) -> None:
    with suppress(OSError):
        os.write(2, f"headway: {line}\n".encode())


class _Stream:
    """One pipe of one rank."""

    def __init__(
        self, fd: int, prefix: bytes, console: _Console, log: _Log | None, tail: deque[bytes]
    ) -> None:
        self.fd = fd
        self._prefix = prefix
        self._console = console
        self._log = log
        self._tail = tail
        self._rest = b""

    @property
    def is_unfinished(self) -> bool:
        return bool(self._rest) and self._console.is_terminal

    def read_rest(self) -> None:
        """Take what stands in the pipe, without waiting for more."""
        os.set_blocking(self.fd, False)
        with suppress(BlockingIOError):
            while self.read():
                pass

    def read(self) -> bool:
        """Take what there is; False at the end, or when nobody reads the launcher's output."""
        try:
            data = os.read(self.fd, 65536)
        except OSError as error:
            if error.errno != errno.EIO:  # a terminal's way to say that its other end is closed
                raise
            return False
        if not data or self._console.has_no_reader:
            return False
        if self._log is not None:
            self._log.write(data)
        self._rest += data
        self._show_lines()
        return True

    def _show_lines(self) -> None:
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            self._tail.append(line.rpartition(b"\r")[2] or line)
            self._console.write(self, line + b"\n", self._prefix)
        if self._console.is_terminal and b"\r" in self._rest[1:]:
            drawn, _, last = self._rest.rpartition(b"\r")
            self._console.write(self, drawn, self._prefix)
            self._rest = b"\r" + last
        if len(self._rest) > _LONGEST:
            self.show_unfinished()

    def show_unfinished(self) -> None:
        if self._rest and (self._console.is_terminal or len(self._rest) > _LONGEST):
            self._console.write(self, self._rest, self._prefix)
            self._rest = b""

    def finish(self) -> None:
        """Show an unfinished last line, and give the pipe and the log back."""
        if self._rest:
            self._tail.append(self._rest)
            self._console.write(self, self._rest + b"\n", self._prefix)
            self._rest = b""
        os.close(self.fd)
        if self._log is not None:
            self._log.release()
