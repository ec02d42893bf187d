"""Reads the ranks' output from pipes, stores it in logs and tails, and shows it on the console.

One thread waits for all pipes, without polling. It never blocks on the launcher's output, which
`sinks.py` writes. While a sink's queue is full, the pipes are not read, so the ranks block. Memory
use is limited to 1 MiB plus one block for each stream of the launcher, and to 1 MiB for the
unfinished line of each pipe.
"""

from __future__ import annotations

import errno
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import BinaryIO

from headway.launcher.output.console import Console, StatusLine
from headway.launcher.output.sinks import write_some
from headway.launcher.output.views import View, make_view

_DRAIN_TIMEOUT_S = 1.0  # for the output of an exited rank's children
_MAX_REST = 2**20  # bytes of a final read; more than the usual capacity of a pipe
_READ_SIZE = 2**16
_NEVER = float("inf")
_TAIL_LINES = 120  # per rank in a failure report; faulthandler writes up to 100 calls
_MAX_LINES = 200  # per rank in the run's record
_MAX_LINE = 4096  # bytes of a stored line

UNREAD_TIMEOUT_S = 1.0
"""While a run is being stopped, output is discarded if nothing reads it for this long."""

FAILURE_UNREAD_TIMEOUT_S = 5.0
"""The same limit after a failure, once all ranks have exited."""


class Output:
    """Reads the ranks' pipes in a thread; `close` waits for the remaining output.

    If `folder` is set, the output is also written to `folder/rank_R_attempt_A.log`, without
    prefixes.
    """

    def __init__(
        self, console: Console, *, folder: str | None, status: StatusLine | None = None
    ) -> None:
        self.console = console
        self._status = status
        self.console.on_change = self._wake
        self.folder = folder
        self._attempt = 0
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._added: list[_Stream] = []
        self._paused: set[_Stream] = set()  # waiting for a slow reader
        self._tails: dict[int, Tail] = {}
        self.lost_logs = ""  # a message if log files are incomplete
        self._timeout_s = _NEVER
        self._deadline = _NEVER
        self._read_at = 0.0
        self._thread = threading.Thread(target=self._run, name="headway-output", daemon=True)
        self._thread.start()

    def begin(self, attempt: int, ranks: Collection[int]) -> None:
        self._attempt = attempt
        self._timeout_s = _NEVER
        self.console.begin(ranks)

    def add(self, rank: int, pipes: dict[int, int]) -> None:
        """Read a new rank's pipes, {1: fd of stdout, 2: fd of stderr}, and close them at EOF."""
        tail = self._tails[rank] = Tail()
        for target, fd in pipes.items():
            log = None
            if self.folder is not None:
                log = Log(self._log_path(rank), self._report_lost_logs)
            self._added.append(_Stream(fd, rank, target, self.console, log, tail))
        self._wake()

    def append(self, rank: int, text: str) -> None:
        """Add text to the log and the tail of an exited rank, without showing it."""
        data = text.encode(errors="backslashreplace")
        self._tails[rank].add(data)
        if self.folder is not None:
            with suppress(OSError), open(self._log_path(rank), "ab") as log:
                log.write(data)

    def _log_path(self, rank: int) -> str:
        assert self.folder is not None
        return os.path.join(self.folder, f"rank_{rank}_attempt_{self._attempt}.log")

    def _report_lost_logs(self, error: OSError) -> None:
        """Report once that log files are incomplete."""
        if not self.lost_logs:
            self.lost_logs = f"logs in {self.folder} are incomplete: {error.strerror}"
            self.console.warn(self.lost_logs)

    @property
    def is_incomplete(self) -> bool:
        return self.console.has_lost_output or bool(self.lost_logs)

    def tail(self, rank: int, most: int = _TAIL_LINES) -> list[str]:
        """Return the last lines of a rank's stderr and stdout, which are complete after `close`."""
        return self._tails[rank].lines(most) if rank in self._tails else []

    def last_line(self, rank: int) -> str:
        return next((line for line in reversed(self.tail(rank)) if line.strip()), "")

    @property
    def last_output_at(self) -> float:
        """The monotonic time of the last output; the current time while output is blocked."""
        return time.monotonic() if self._paused else self._read_at

    def set_timeout(self, timeout_s: float) -> None:
        """From now on, discard the output for streams that accept no data for `timeout_s`."""
        self._timeout_s = timeout_s
        self._wake()

    def close(self, timeout_s: float = _NEVER) -> None:
        """Write the remaining output and stop reading; `timeout_s` is as in `set_timeout`."""
        self._timeout_s = min(self._timeout_s, timeout_s)
        self._deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        self._wake()
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._selector.close()

    def _wake(self) -> None:
        with suppress(OSError):  # the thread is already being woken, or has finished
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        streams: set[_Stream] = set()
        while self._deadline == _NEVER or (streams and time.monotonic() < self._deadline):
            self._register_new(streams)
            for stream in [paused for paused in self._paused if not paused.is_blocked]:
                self._paused.discard(stream)
                self._selector.register(stream.fd, selectors.EVENT_READ, stream)
            for key, _ in self._selector.select(self._wait_s(streams)):
                if key.data is None:
                    os.read(self._wake_read, 4096)
                else:
                    self._read(key.data, streams)
            now = time.monotonic()
            if self._status is not None:
                self._status.show_due(now)
            due = [stream for stream in streams - self._paused if stream.due <= now]
            for stream in sorted(due, key=lambda stream: stream.rank):
                stream.show_due()
            self.console.discard_unread(self._timeout_s)
        self._register_new(streams)
        for stream in streams:
            stream.read_rest()
            stream.finish()
        self.console.close(self._timeout_s)

    def _register_new(self, streams: set[_Stream]) -> None:
        while self._added:
            stream = self._added.pop()
            self._selector.register(stream.fd, selectors.EVENT_READ, stream)
            streams.add(stream)

    def _read(self, stream: _Stream, streams: set[_Stream]) -> None:
        if stream.is_blocked:
            self._selector.unregister(stream.fd)
            self._paused.add(stream)
            return
        self._read_at = time.monotonic()
        if not stream.read():
            self._selector.unregister(stream.fd)
            streams.discard(stream)
            stream.finish()

    def _wait_s(self, streams: Iterable[_Stream]) -> float | None:
        """Return the timeout for `select`, or None if there is no limit."""
        moments = [stream.due for stream in streams if stream not in self._paused]
        status_due = _NEVER if self._status is None else self._status.due
        due = min([self._deadline, status_due, *moments]) - time.monotonic()
        due = min(due, self.console.wait_s(self._timeout_s))
        return None if due == _NEVER else max(0, due)


class _Stream:
    def __init__(
        self, fd: int, rank: int, target: int, console: Console, log: Log | None, tail: Tail
    ) -> None:
        self.fd = fd
        self.rank = rank
        self._target = target
        self._console = console
        self._log = log
        self._tail = tail
        self._view: View | None = make_view(console, rank, target)

    @property
    def is_blocked(self) -> bool:
        """Whether the console's queue is full."""
        return self._view is not None and self._console.is_full(self._target)

    @property
    def due(self) -> float:
        """The monotonic time at which to call `show_due`."""
        return _NEVER if self._view is None else self._view.due

    def show_due(self) -> None:
        """Show an unfinished line, or the latest state of a progress bar."""
        if self._view is not None:
            self._view.show_due()

    def read_rest(self) -> None:
        """Read the available data without blocking."""
        os.set_blocking(self.fd, False)
        with suppress(BlockingIOError):
            for _ in range(_MAX_REST // _READ_SIZE):
                if not self.read():
                    break

    def read(self) -> bool:
        """Read the available data; return False at EOF, or if nothing reads the console stream."""
        try:
            data = os.read(self.fd, _READ_SIZE)
        except OSError as error:
            if error.errno != errno.EIO:  # the other end of the pseudo-terminal is closed
                raise
            return False
        if not data or (self._view is not None and self._console.has_no_reader(self._target)):
            return False
        if self._log is not None:
            self._log.write(data)
        self._tail.add(data, self._target)
        if self._view is not None:
            self._view.feed(data)
        return True

    def finish(self) -> None:
        """Show an unfinished last line, and close the pipe and the log."""
        if self._view is not None:
            self._view.finish()
        os.close(self.fd)
        if self._log is not None:
            self._log.close()


class Log:
    """A rank's log file for stdout and stderr; an error closes the file and calls `on_error`."""

    def __init__(self, path: str, on_error: Callable[[OSError], None]) -> None:
        self._on_error = on_error
        self._file: BinaryIO | None = None
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115  closed with its stream
        except OSError as error:
            on_error(error)

    def write(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            while data:
                data = data[write_some(self._file.fileno(), data) :]
        except OSError as error:
            self.close()
            self._on_error(error)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


class Tail:
    """The last lines of a rank's stdout and stderr together."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=_MAX_LINES)
        self._rests: dict[int, bytes] = {}  # unfinished lines, by stream

    def add(self, data: bytes, target: int = 2) -> None:
        """Add a rank's next output on stdout (1) or stderr (2)."""
        *lines, rest = (self._rests.get(target, b"") + data).split(b"\n")
        self._lines.extend(line[-_MAX_LINE:] for line in lines[-_MAX_LINES:])
        self._rests[target] = rest[-_MAX_LINE:]

    def lines(self, most: int = _TAIL_LINES) -> list[str]:
        """Return the last lines as a terminal would show them."""
        lines = [*self._lines, *filter(None, self._rests.values())]
        shown = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines[-most:])
        return [line.decode(errors="replace") for line in shown]
