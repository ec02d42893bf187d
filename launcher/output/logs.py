"""What is kept of a rank's output: a log file with every byte, and the last lines in memory."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from typing import BinaryIO

TAIL_LINES = 40  # of each rank, for the report of a failure
_TAIL_SIZE = 2**15  # bytes that are kept of each, in all


class Log:
    """One rank's file, shared by its streams.

    Args:
        path: the file.
        users: how many streams will call `release`.
        on_error: called when the file cannot be written; nothing more is written to it then.
    """

    def __init__(self, path: str, users: int, on_error: Callable[[OSError], None]) -> None:
        self._users = users
        self._on_error = on_error
        self._file: BinaryIO | None = None
        try:
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115  closed with its last stream
        except OSError as error:
            on_error(error)

    def write(self, data: bytes) -> None:
        """Append to the file."""
        if self._file is None:
            return
        try:
            write_all(self._file.fileno(), data)
        except OSError as error:
            self._close()
            self._on_error(error)

    def release(self) -> None:
        """Close the file, once each stream has called this."""
        self._users -= 1
        if not self._users:
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


class Tail:
    """The last lines that a rank wrote, of its stdout and its stderr together."""

    def __init__(self) -> None:
        self._lines = bytearray()  # at most twice as much as is kept
        self._rests: dict[int, bytes] = {}  # unfinished lines, by stream

    def add(self, data: bytes, target: int = 2) -> None:
        """Take what a rank wrote next on its stdout (1) or stderr (2)."""
        is_all = len(data) >= _TAIL_SIZE
        data = data[-_TAIL_SIZE:] if is_all else self._rests.get(target, b"") + data
        end = data.rfind(b"\n") + 1
        self._lines += data[:end]
        if len(self._lines) > 2 * _TAIL_SIZE:
            del self._lines[:-_TAIL_SIZE]
        self._rests[target] = data[end:][-_TAIL_SIZE:]

    def lines(self, most: int = TAIL_LINES) -> list[str]:
        """Return the last lines, each as a terminal would show it."""
        kept = bytes(self._lines[-_TAIL_SIZE:])
        text = kept + b"".join(rest + b"\n" for rest in self._rests.values() if rest)
        lines = [line.rstrip(b"\r") for line in text.split(b"\n")[:-1]]
        shown = [line.rpartition(b"\r")[2] for line in lines]
        return [line.decode(errors="replace") for line in shown[-most:]]


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, also where writes are partial or non-blocking."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select([], [fd], [])
