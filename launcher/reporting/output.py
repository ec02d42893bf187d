"""Reads the ranks' output from pipes; keeps it in logs and tails, and shows it on the console.

One thread waits for all pipes at once; nothing is polled. On a terminal a progress bar stays a bar:
a carriage return ends a piece too, and a piece that stops growing is shown before its line is
complete.
"""

from __future__ import annotations

import errno
import io
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Collection
from contextlib import suppress

from headway.launcher.reporting.console import Console, warn, write_all

_IDLE_S = 0.1  # an unfinished line is shown on a terminal after this
_DRAIN_S = 1.0  # the longest wait for what a dead rank's children may still write
_TAIL_LINES = 40  # kept of each rank, for the report of a failure
_LONGEST = 2**20  # bytes; a longer line is shown in pieces
_NEVER = float("inf")


class Output:
    """Reads the ranks' pipes until they close; `close` waits for the rest and ends the thread.

    Args:
        console: where the lines are shown.
        folder: keep a copy in `folder/rank_R_attempt_A.log`, without the prefix.
    """

    def __init__(self, console: Console, *, folder: str | None) -> None:
        self._console = console
        self._folder = folder
        self._attempt = 0
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._added: list[_Stream] = []
        self._tails: dict[int, deque[bytes]] = {}
        self._deadline = _NEVER
        self.last_output_at = 0.0  # on the monotonic clock
        self._thread = threading.Thread(target=self._pump, name="headway-output", daemon=True)
        self._thread.start()

    def begin(self, attempt: int, ranks: Collection[int]) -> None:
        """Set which ranks will be added, in which attempt."""
        self._attempt = attempt
        self._console.begin(ranks)

    def add(self, rank: int, pipes: dict[int, int]) -> None:
        """Read a new rank's pipes, {1: fd of stdout, 2: fd of stderr}; closes them at their end."""
        log = None
        if self._folder is not None and pipes:
            log = _Log(open(self._log_of(rank), "wb", buffering=0), len(pipes))  # noqa: SIM115  closed with its last stream
        tail = self._tails[rank] = deque(maxlen=_TAIL_LINES)
        for target, fd in pipes.items():
            self._added.append(_Stream(fd, rank, target, self._console, log, tail))
        self._wake()

    def keep(self, rank: int, text: str) -> None:
        """Add to the log and the tail of a rank that has ended, and show nothing."""
        data = text.encode(errors="backslashreplace")
        self._tails[rank].extend(data.splitlines())
        if self._folder is not None:
            with suppress(OSError), open(self._log_of(rank), "ab") as log:
                log.write(data)

    def _log_of(self, rank: int) -> str:
        assert self._folder is not None
        return os.path.join(self._folder, f"rank_{rank}_attempt_{self._attempt}.log")

    def tail(self, rank: int) -> list[str]:
        """Return the last lines of a rank's stderr and stdout; complete after `close`."""
        return [line.decode(errors="replace") for line in self._tails.get(rank, ())]

    @property
    def has_lost_output(self) -> bool:
        """Return whether some output could not be written, for example to a full disk."""
        return self._console.has_lost_output

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
        while self._deadline == _NEVER or (streams and time.monotonic() < self._deadline):
            for key, _ in self._selector.select(self._wait_s(streams)):
                if key.data is None:
                    os.read(self._wake_read, 4096)
                    continue
                self.last_output_at = time.monotonic()
                if not key.data.read():
                    self._selector.unregister(key.fd)
                    streams.discard(key.data)
                    key.data.finish()
            while self._added:
                stream = self._added.pop()
                self._selector.register(stream.fd, selectors.EVENT_READ, stream)
                streams.add(stream)
            now = time.monotonic()
            self._console.show_due(now)
            for stream in streams:
                if stream.due <= now:
                    stream.show_unfinished()
        for stream in streams:
            stream.read_rest()
            stream.finish()
        self._console.close()

    def _wait_s(self, streams: set[_Stream]) -> float | None:
        """Return how long there is nothing to do unless a rank writes; None: no limit."""
        due = min(self._deadline, self._console.due, *(stream.due for stream in streams))
        return None if due == _NEVER else max(0, due - time.monotonic())


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
            write_all(self._file.fileno(), data)
        except OSError as error:
            self._is_full = True
            warn(f"{self._file.name} is cut short: {error.strerror}")

    def release(self) -> None:
        self._users -= 1
        if not self._users:
            self._file.close()


class _Stream:
    """One pipe of one rank."""

    def __init__(
        self,
        fd: int,
        rank: int,
        target: int,
        console: Console,
        log: _Log | None,
        tail: deque[bytes],
    ) -> None:
        self.fd = fd
        self._rank = rank
        self._target = target
        self._console = console
        self._log = log
        self._tail = tail
        self._rest = b""
        self._read_at = 0.0
        self._is_shown = console.shows(rank)
        self._is_live = self._is_shown and console.is_terminal(target)

    @property
    def due(self) -> float:
        """When an unfinished line has to be shown, on the monotonic clock."""
        return self._read_at + _IDLE_S if self._rest and self._is_live else _NEVER

    def read_rest(self) -> None:
        """Read what is in the pipe, without waiting for more."""
        os.set_blocking(self.fd, False)
        with suppress(BlockingIOError):
            while self.read():
                pass

    def read(self) -> bool:
        """Read what is there; False at the end, or when the launcher's output has no reader."""
        try:
            data = os.read(self.fd, 65536)
        except OSError as error:
            if error.errno != errno.EIO:  # the other end of the pseudo-terminal is closed
                raise
            return False
        if not data or (self._is_shown and self._console.has_no_reader(self._target)):
            return False
        if self._log is not None:
            self._log.write(data)
        self._rest += data
        self._read_at = time.monotonic()
        self._show_lines()
        return True

    def _show_lines(self) -> None:
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            self._show_line(line)
        if self._is_live and b"\r" in self._rest[1:]:
            drawn, _, last = self._rest.rpartition(b"\r")
            self._console.write_piece(self._rank, self._target, drawn)
            self._rest = b"\r" + last
        if len(self._rest) > _LONGEST:
            self.show_unfinished()

    def _show_line(self, line: bytes) -> None:
        self._tail.append(line.rpartition(b"\r")[2] or line)
        if self._is_shown:
            self._console.write_line(self._rank, self._target, line + b"\n")

    def show_unfinished(self) -> None:
        """Show the beginning of a line that may go on."""
        if self._is_shown:
            self._console.write_piece(self._rank, self._target, self._rest)
        self._rest = b""

    def finish(self) -> None:
        """Show an unfinished last line, and close the pipe and the log."""
        if self._rest:
            self._show_line(self._rest)
            self._rest = b""
        os.close(self.fd)
        if self._log is not None:
            self._log.release()
