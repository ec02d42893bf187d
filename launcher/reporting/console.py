"""Shows the ranks' lines on the launcher's stdout and stderr: prefixed, coloured, merged, whole.

On a terminal, a line that several ranks write within a tenth of a second is shown once, with all of
them in its prefix: `[0, 2-3] loading data`. A line is held for at most that long, and only until
every rank has written it or a later one. The order of each rank's stdout is kept, and that of its
stderr; between the two, which are separate pipes, a line may move by that tenth of a second.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import NamedTuple, TextIO

from headway.launcher.reporting.failures import ranges

_MERGE_S = 0.1
_MAX_HELD = 1000  # lines
_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # SGR codes; red is for errors
_NEVER = float("inf")


class Console:
    """The launcher's stdout and stderr, shared by all ranks; used by one thread after `begin`.

    Args:
        prefixed: put `[rank] ` before each line.
        colored: give the prefixes colours where they are on a terminal.
        ranks: show these alone; None shows all.
    """

    def __init__(self, *, prefixed: bool, colored: bool, ranks: Collection[int] | None) -> None:
        self._prefixed = prefixed
        self._ranks = ranks
        out, error = _Sink(sys.stdout, colored), _Sink(sys.stderr, colored)
        if out.is_terminal and error.is_terminal:
            error.cursor = out.cursor
        self._sinks = {1: out, 2: error}
        self._held: deque[_Line] = deque()
        self._newest: dict[
            tuple[int, int], int
        ] = {}  # by rank and target, its newest line's number
        self._count = 0

    def begin(self, ranks: Iterable[int]) -> None:
        """Set which ranks will write: a line that all of them have written is held no longer."""
        self._newest = {
            (rank, target): 0 for rank in ranks if self.shows(rank) for target in (1, 2)
        }

    def shows(self, rank: int) -> bool:
        """Return whether the output of this rank is shown."""
        return self._ranks is None or rank in self._ranks

    def is_terminal(self, target: int) -> bool:
        return self._sinks[target].is_terminal

    def has_no_reader(self, target: int) -> bool:
        """Return whether the reader is gone; the ranks then get SIGPIPE, as without a launcher."""
        return self._sinks[target].has_no_reader

    @property
    def has_lost_output(self) -> bool:
        """Whether some output could not be written, for example to a full disk."""
        return any(sink.has_lost_output for sink in self._sinks.values())

    @property
    def due(self) -> float:
        """When `show_due` has something to show, on the monotonic clock."""
        return self._held[0].due if self._held else _NEVER

    def write_line(self, rank: int, target: int, text: bytes) -> None:
        """Show a line, or the rest of one; it may be held for a moment to be merged."""
        sink = self._sinks[target]
        if not self._prefixed or not sink.is_terminal or sink.cursor.owner == (rank, target):
            self._show([rank], target, text)
            return
        line = self._same_line(rank, target, text)
        if line is None:
            self._count += 1
            line = _Line(self._count, time.monotonic() + _MERGE_S, target, text, [])
            self._held.append(line)
        line.ranks.append(rank)
        self._newest[rank, target] = line.number
        while self._held and (self._is_complete(self._held[0]) or len(self._held) > _MAX_HELD):
            self._show_oldest()

    def write_piece(self, rank: int, target: int, text: bytes) -> None:
        """Show an unfinished line at once: a progress bar, a prompt, a very long line."""
        self._show_through(max(self._newest.get((rank, either), 0) for either in (1, 2)))
        self._show([rank], target, text)

    def show_due(self, now: float) -> None:
        """Show the lines that have been held long enough."""
        while self._held and self._held[0].due <= now:
            self._show_oldest()

    def close(self) -> None:
        """Show all lines that are held."""
        self._show_through(self._count)

    def _same_line(self, rank: int, target: int, text: bytes) -> _Line | None:
        """Return the oldest held line with this text that comes after the rank's newest one."""
        found = None
        for line in reversed(self._held):
            if line.number <= self._newest[rank, target]:
                break
            if (line.target, line.text) == (target, text):
                found = line
        return found

    def _is_complete(self, line: _Line) -> bool:
        """Return whether each rank has written this line, or a later one."""
        return all(
            newest >= line.number
            for (_, target), newest in self._newest.items()
            if target == line.target
        )

    def _show_through(self, number: int) -> None:
        while self._held and self._held[0].number <= number:
            self._show_oldest()

    def _show_oldest(self) -> None:
        line = self._held.popleft()
        self._show(line.ranks, line.target, line.text)

    def _show(self, ranks: list[int], target: int, text: bytes) -> None:
        sink = self._sinks[target]
        sink.write((ranks[0], target), text, sink.prefix(ranks) if self._prefixed else b"")


class _Line(NamedTuple):
    """A line that is held until other ranks write it too."""

    number: int  # in the order in which the lines came
    due: float
    target: int
    text: bytes
    ranks: list[int]


class _Cursor:
    """Which rank and stream (1 or 2) wrote the unfinished line that a terminal's cursor is in."""

    owner: tuple[int, int] | None = None


class _Sink:
    """One of the launcher's own streams."""

    def __init__(self, stream: TextIO, colored: bool) -> None:
        stream.flush()
        self._fd = stream.fileno()
        self.is_terminal = stream.isatty()
        self._colored = colored and self.is_terminal
        self.cursor = _Cursor()
        self.is_closed = False
        self.has_no_reader = False
        self.has_lost_output = False

    def prefix(self, ranks: list[int]) -> bytes:
        label = f"[{ranges(ranks)}]"
        if self._colored and len(ranks) == 1:
            label = f"\x1b[{_COLORS[ranks[0] % len(_COLORS)]}m{label}\x1b[0m"
        return f"{label} ".encode()

    def write(self, owner: tuple[int, int], piece: bytes, prefix: bytes) -> None:
        if self.is_closed:
            return
        before = self.cursor.owner
        if before != owner:
            piece = prefix + piece.removeprefix(b"\r")
        if prefix:  # a progress bar is redrawn from the beginning of the line
            piece = re.sub(rb"\r(?!\n|$)", b"\r" + prefix, piece)
        if before is not None and before[0] != owner[0]:
            piece = b"\n" + piece
        self.cursor.owner = None if piece.endswith(b"\n") else owner
        try:
            write_all(self._fd, piece)
        except BrokenPipeError:
            self.has_no_reader = True
            self._give_up()
        except OSError as error:
            self._give_up()
            warn(f"the ranks' output could not be written: {error.strerror}; it is lost")
            self.has_lost_output = True

    def _give_up(self) -> None:
        """Discard all further output, also what Python has buffered for this stream."""
        self.is_closed = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._fd)
        os.close(null)


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, also where writes are partial or non-blocking."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select([], [fd], [])


def warn(line: str) -> None:
    """Print a line of the launcher's own, where that is still possible."""
    with suppress(OSError):
        os.write(2, f"headway: {line}\n".encode())
