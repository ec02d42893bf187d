"""Shows the ranks' lines on the launcher's stdout and stderr: prefixed, coloured, merged, whole.

On a terminal, a line that several ranks write within a tenth of a second is shown once, with all of
them in its prefix: `[0, 2-3] loading data`. A line is held for at most that long, and only until
every rank has written it or a later one. The order of each rank's stdout is kept, and that of its
stderr; between the two, which are separate pipes, a line may move by that tenth of a second.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, TextIO

from headway.contract.notes import line_of, ranges
from headway.launcher.output.sinks import MAX_QUEUED, Sink, is_same_file

_MERGE_S = 0.1
_MAX_HELD = 1000  # lines
_BAR_S = 10.0  # a rank whose bar has not moved for so long no longer has the terminal's bar
_NOTICE_S = 1.0  # a wait for a reader is announced after this
_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # SGR codes; red is for errors
_NAMES = {1: "stdout", 2: "stderr"}
_BELOW_FROM_S, _BELOW_EVERY_S = 10.0, 1.0  # the status line, on a terminal
_LINE_EVERY_S = 60.0  # and elsewhere
_NEVER = float("inf")


class Console:
    """The launcher's stdout and stderr, shared by all ranks; used by one thread after `begin`.

    With `ranks`, only those are shown; with `is_raw`, every byte is passed on as it is. `moves`:
    the terminal obeys movements of its cursor.
    """

    def __init__(
        self,
        *,
        prefixed: bool,
        colored: bool,
        ranks: Collection[int] | None,
        is_raw: bool = False,
        moves: bool = False,
    ) -> None:
        self.is_raw = is_raw
        self.on_change: Callable[[], None] = lambda: None
        self.is_prefixed = prefixed
        self._colored = colored
        self._ranks = ranks
        self._fds = {}
        for target, stream in ((1, sys.stdout), (2, sys.stderr)):
            with suppress(OSError):  # the disk behind it is full, as the sink will find out
                stream.flush()
            self._fds[target] = stream.fileno()
        out = Sink(self._fds[1], sys.stdout.isatty(), self._note_change)
        error = out
        if not is_same_file(sys.stdout, sys.stderr):
            error = Sink(self._fds[2], sys.stderr.isatty(), self._note_change)
        self._sinks = {1: out, 2: error}
        terminals = (one for one in (error, out) if one.is_terminal)
        self._sink_below = next(terminals, None) if moves and not is_raw else None
        self._lost: set[Sink] = set()
        self._bar = (-1, 0.0)  # the rank that draws the terminal's bar, and until when
        self._held: deque[_Line] = deque()
        self._held_size = 0
        # by rank and target, the number of its newest line
        self._newest: dict[tuple[int, int], int] = {}
        self._count = 0

    def begin(self, ranks: Iterable[int]) -> None:
        """Set which ranks will write: a line that all of them have written is held no longer."""
        self._newest = {
            (rank, target): 0 for rank in ranks if self.shows(rank) for target in (1, 2)
        }

    @contextmanager
    def takes_stderr(self) -> Iterator[None]:
        """Let what this process itself prints on `sys.stderr` take its turn, and never block."""
        usual = sys.stderr
        sys.stderr = _OwnText(self._say, usual)
        try:
            yield
        finally:
            sys.stderr = usual

    def shows(self, rank: int) -> bool:
        """Return whether the output of this rank is shown."""
        return self._ranks is None or rank in self._ranks

    @property
    def has_terminal(self) -> bool:
        """Whether there is a terminal on which lines have their places."""
        return self._sink_below is not None

    def show_below(self, text: str) -> None:
        """Let a line be below all output on the terminal, until the next one; empty: none."""
        if self._sink_below is not None:
            self._sink_below.show_below(text)

    def is_terminal(self, target: int) -> bool:
        return self._sinks[target].is_terminal

    def is_full(self, target: int) -> bool:
        """Return whether so much waits for a reader that the ranks have to wait too."""
        return self._sinks[target].is_full

    def has_no_reader(self, target: int) -> bool:
        """Return whether the reader is gone; the ranks then get SIGPIPE, as without a launcher."""
        return isinstance(self._sinks[target].error, BrokenPipeError)

    @property
    def lost_reader(self) -> str:
        """The names of the streams whose reader has gone."""
        return " and ".join(_NAMES[target] for target in self._fds if self.has_no_reader(target))

    @property
    def has_lost_output(self) -> bool:
        """Whether some output could not be written, for example to a full disk."""
        errors = [sink.error for sink in self._lost]
        return any(error and not isinstance(error, BrokenPipeError) for error in errors)

    @property
    def due(self) -> float:
        """When `show_due` has something to show, on the monotonic clock."""
        return self._held[0].due if self._held else _NEVER

    def pass_on(self, target: int, data: bytes) -> None:
        """Show bytes as they are."""
        self._sinks[target].pass_on(data)

    def write_lines(self, rank: int, target: int, lines: bytes, *, is_new: bool = False) -> None:
        """Show whole lines of one rank's stdout (1) or stderr (2) at once.

        The first may be the rest of a line; with `is_new` it does not go on with an unfinished one.
        """
        self._show([rank], target, lines, is_new=is_new)

    def write_line(self, rank: int, target: int, text: bytes) -> None:
        """Show a line, or the rest of one; it may be held for a moment to be merged."""
        sink = self._sinks[target]
        if not self.is_prefixed or not sink.is_terminal or sink.owner == (rank, target):
            self._show([rank], target, text)
            return
        line = self._same_line(rank, target, text)
        if line is None:
            self._count += 1
            line = _Line(self._count, time.monotonic() + _MERGE_S, target, text, [])
            self._held.append(line)
            self._held_size += len(text)
        line.ranks.append(rank)
        self._newest[rank, target] = line.number
        while self._held and (self._is_complete(self._held[0]) or self._holds_too_much()):
            self._show_oldest()

    def write_piece(self, rank: int, target: int, text: bytes) -> None:
        """Show an unfinished line at once: a progress bar, a prompt, a very long line."""
        self._show_through(max(self._newest.get((rank, either), 0) for either in (1, 2)))
        self._show([rank], target, text)

    def may_draw(self, rank: int) -> bool:
        """Return whether this rank's progress bar is the one that moves on the terminal.

        It is that of the lowest rank that draws one.
        """
        drawing, until = self._bar
        now = time.monotonic()
        if rank > drawing >= 0 and now < until:
            return False
        self._bar = (rank, now + _BAR_S)
        return True

    def show_due(self, now: float) -> None:
        """Show the lines that have been held long enough."""
        while self._held and self._held[0].due <= now:
            self._show_oldest()

    def give_up(self, patience_s: float) -> None:
        """Discard the output for streams that fail, or have accepted nothing for `patience_s`."""
        for sink in {*self._sinks.values()} - self._lost:
            if sink.error is not None:
                self._lose(sink)
                if not isinstance(sink.error, BrokenPipeError):
                    cause = sink.error.strerror
                    self.warn(f"the ranks' output could not be written: {cause}; it is lost")
            elif (since := sink.stuck_since) and time.monotonic() - since >= patience_s:
                lost = sink.abandon()
                self._lose(sink)
                name = self._name(sink)
                self.warn(f"{name} was not read for {patience_s:g} s: {lost} bytes are lost")

    def wait_s(self, patience_s: float) -> float:
        """Return how long `give_up` has nothing to do, unless a stream fails."""
        times = [sink.stuck_since for sink in self._sinks.values()]
        now = time.monotonic()
        return min((since + patience_s - now for since in times if since), default=_NEVER)

    def close(self, patience_s: float) -> None:
        """Show all lines that are held, and wait until everything is written.

        The output for a stream that accepts nothing for `patience_s` seconds is discarded.
        """
        self._show_through(self._count)
        self.show_below("")
        for sink in {*self._sinks.values()}:
            sink.end_line()
            if not sink.wait(time.monotonic() + min(_NOTICE_S, patience_s)):
                self.warn(f"waiting for {self._name(sink)} to be read")
            while not sink.wait(time.monotonic() + max(0, self.wait_s(patience_s))):
                self.give_up(patience_s)
        self.give_up(patience_s)
        for sink in {*self._sinks.values()}:
            sink.close()

    def begin_line(self) -> None:
        """After `close`, end a line that bytes passed on as they are have left unfinished."""
        sink = self._sinks[2]
        if sink.takes_unfinished_line() and sink not in self._lost:
            with suppress(OSError):
                os.write(self._fds[2], b"\n")

    def _say(self, text: str) -> None:
        """Print lines of the launcher's own on stderr, or on stdout where stderr is lost."""
        is_lost = self._sinks[2].error is not None or self._sinks[2] in self._lost
        self._sinks[1 if is_lost else 2].say(text)

    def warn(self, line: str) -> None:
        """Print a line of the launcher's own on stderr, or on stdout where stderr is not read."""
        for target in (2, 1):
            sink = self._sinks[target]
            since = sink.stuck_since
            is_stuck = since is not None and time.monotonic() - since >= _NOTICE_S
            if sink not in self._lost and sink.error is None and not is_stuck:
                sink.say(line_of(line))
                return

    def _name(self, sink: Sink) -> str:
        return " and ".join(_NAMES[target] for target, one in self._sinks.items() if one is sink)

    def _lose(self, sink: Sink) -> None:
        """Replace the descriptors of a lost stream: Python may have buffered something for it.

        What is printed on stderr later goes to stdout, where that is left.
        """
        self._lost.add(sink)
        null = os.open(os.devnull, os.O_WRONLY)
        for target, one in self._sinks.items():
            if one is sink:
                is_left = target == 2 and self._sinks[1] not in self._lost
                os.dup2(self._fds[1] if is_left else null, self._fds[target])
        os.close(null)

    def _note_change(self) -> None:
        self.on_change()

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

    def _holds_too_much(self) -> bool:
        return len(self._held) > _MAX_HELD or self._held_size > MAX_QUEUED

    def _show_through(self, number: int) -> None:
        while self._held and self._held[0].number <= number:
            self._show_oldest()

    def _show_oldest(self) -> None:
        line = self._held.popleft()
        self._held_size -= len(line.text)
        self._show(line.ranks, line.target, line.text)

    def _show(self, ranks: list[int], target: int, text: bytes, *, is_new: bool = False) -> None:
        sink = self._sinks[target]
        prefix = self._prefix(ranks, sink) if self.is_prefixed else b""
        sink.show((ranks[0], target), text, prefix, is_new=is_new)

    def _prefix(self, ranks: list[int], sink: Sink) -> bytes:
        label = f"[{ranges(ranks)}]"
        if self._colored and sink.is_terminal and len(ranks) == 1:
            label = f"\x1b[{_COLORS[ranks[0] % len(_COLORS)]}m{label}\x1b[0m"
        return f"{label} ".encode()


class StatusLine:
    """Shows how the run is doing in one line, at its times: what `describe` returns, if anything.

    It is a line of its own every `every_s` seconds; with None it is below the output of a terminal
    from the tenth second on, and comes once a minute elsewhere. The thread that reads the ranks'
    output calls it.
    """

    def __init__(
        self, console: Console, describe: Callable[[], str], every_s: float | None
    ) -> None:
        self._console = console
        self._describe = describe
        self._is_below = every_s is None and console.has_terminal
        self._every_s = _BELOW_EVERY_S if self._is_below else every_s or _LINE_EVERY_S
        self.due = time.monotonic() + (_BELOW_FROM_S if self._is_below else self._every_s)

    def show_due(self, now: float) -> None:
        """Show the line, if it is time."""
        if now < self.due:
            return
        self.due = now + self._every_s
        line = self._describe()
        if self._is_below:
            self._console.show_below(line)
        elif line:
            self._console.warn(line)


class _Line(NamedTuple):
    """A line that is held until other ranks write it too."""

    number: int  # in the order in which the lines came
    due: float
    target: int
    text: bytes
    ranks: list[int]


class _OwnText(io.TextIOBase):
    """`sys.stderr` of this process while the ranks' output is shown; its lines stay whole."""

    def __init__(self, say: Callable[[str], None], usual: TextIO) -> None:
        self._say = say
        self._usual = usual
        self._unfinished: dict[int, str] = {}  # by thread

    def write(self, text: str) -> int:
        thread = threading.get_ident()
        lines, newline, rest = (self._unfinished.pop(thread, "") + text).rpartition("\n")
        if newline:
            self._say(lines + newline)
        if rest:
            self._unfinished[thread] = rest
        return len(text)

    def fileno(self) -> int:
        return self._usual.fileno()

    def isatty(self) -> bool:
        return self._usual.isatty()
