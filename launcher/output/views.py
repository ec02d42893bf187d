"""What the console shows of one stream of a rank: as it is, as lines, or with a moving bar."""

from __future__ import annotations

import re
import time

from headway.launcher.diagnosis.torch_messages import RANK_PREFIX
from headway.launcher.output.console import Console

MAX_LINE = 2**20  # bytes; a longer line is shown in pieces
_TERMINAL_DELAY_S = 0.1  # an unfinished line is shown on a terminal after this
_FILE_DELAY_S = 1.0  # and elsewhere after this
_BAR_INTERVAL_S = 10.0  # between two states of a progress bar without a terminal
_NEVER = float("inf")
_UP = b"\x1b[A"  # what bars below each other write to go up a line; they go down by line feeds
_WENT_UP = re.compile(rb"(?:\x1b\[A)+(?!\x1b|\Z)")


def make_view(console: Console, rank: int, target: int) -> View | None:
    """Return the view of a rank's stdout (1) or stderr (2); None if it is not shown."""
    if not console.shows(rank):
        return None
    if console.is_raw:
        return View(console, rank, target)
    if not console.is_terminal(target):
        return FileView(console, rank, target, _FILE_DELAY_S, _BAR_INTERVAL_S)
    if rank == console.first:
        return TerminalView(console, rank, target)
    return FileView(console, rank, target, _TERMINAL_DELAY_S, _NEVER)


class View:
    """Shows what a rank writes: here, every byte as it comes."""

    def __init__(self, console: Console, rank: int, target: int) -> None:
        self._console = console
        self._rank = rank
        self._target = target
        self._rest = b""  # of the last line, which is unfinished
        self._due = _NEVER
        torchs_prefix = RANK_PREFIX.text.format(rank=rank).encode()
        self._torchs_prefixes = re.compile(rb"(?m)^(?:%s ?)+" % re.escape(torchs_prefix))

    def feed(self, data: bytes) -> None:
        self._console.forward(self._target, data)

    @property
    def due(self) -> float:
        """When `show_due` has something to show, on the monotonic clock."""
        return self._due

    def show_due(self) -> None:
        """Show what has waited long enough to be finished."""

    def finish(self) -> None:
        """Show what is left: no more will come."""

    def _write(self, text: bytes, *, is_new: bool = False) -> None:
        """Show text without the rank that torch puts before a traceback, where we put it too."""
        if self._target == 2 and self._console.is_prefixed and b"[" in text:
            text = self._torchs_prefixes.sub(b"", text)
        self._console.write(self._rank, self._target, text, is_new=is_new)


class FileView(View):
    """Whole lines at once, an unfinished one and the state of a progress bar at their times.

    A bar is a line with carriage returns, each of which replaces what was drawn before: what was
    drawn last is shown. Bars that are drawn below each other are one such line.
    """

    def __init__(
        self, console: Console, rank: int, target: int, unfinished_s: float, bar_s: float
    ) -> None:
        super().__init__(console, rank, target)
        self._unfinished_s, self._bar_s = unfinished_s, bar_s
        self._shown_state = b""  # of the bar
        self._shown_at = 0.0

    def feed(self, data: bytes) -> None:
        text = self._rest + data
        if b"\x1b" in text:  # a search for one byte is a hundred times faster than for more
            while _UP + b"\n" in text:
                text = text.replace(_UP + b"\n", b"")
            text = _WENT_UP.sub(b"\r", text)
        end = text.rfind(b"\n") + 1
        if end:
            self._show_lines(text[:end])
            self._due = _NEVER
        self._rest = _last_state(text[end:])
        if len(self._rest) > MAX_LINE:
            self.show_due()
        elif self._rest and self._due == _NEVER:
            self._due = time.monotonic() + self._unfinished_s
            if _is_bar(self._rest):
                self._due = max(self._due, self._shown_at + self._bar_s)

    def show_due(self) -> None:
        self._due = _NEVER
        if b"\r" not in self._rest or len(self._rest) > MAX_LINE:
            self._write(self._rest)
            self._rest = b""
        elif (state := _last_drawn(self._rest)) not in (b"", self._shown_state):
            self._write(state + b"\n", is_new=True)
            self._shown_state, self._shown_at = state, time.monotonic()

    def finish(self) -> None:
        if self._rest:
            self._show_lines(self._rest + b"\n")
        self._rest = b""

    def _show_lines(self, lines: bytes) -> None:
        first, _, others = lines.partition(b"\n")
        is_bar = _is_bar(first) or bool(self._shown_state)
        if is_bar:
            state, first = _last_drawn(first), b""
            if state and state != self._shown_state:
                first = state + b"\n"
            self._shown_state = b""
        else:
            first += b"\n"
        if b"\r" in others:
            others = b"".join(
                _last_drawn(line) + b"\n" if _is_bar(line) else line + b"\n"
                for line in others.split(b"\n")[:-1]
            )
        if first or others:
            self._write(first + others, is_new=is_bar)


def _is_bar(line: bytes) -> bool:
    """Return whether there is a carriage return that does not end a line."""
    return b"\r" in line.removesuffix(b"\r")


def _last_drawn(line: bytes) -> bytes:
    """Return what was drawn last in a line, without what only erases it."""
    states = (word.replace(_UP, b"") for word in reversed(line.split(b"\r")))
    return next((state for state in states if state.strip()), b"")


def _last_state(rest: bytes) -> bytes:
    if not _is_bar(rest):
        return rest
    last = rest.rpartition(b"\r")[2]
    return b"\r" + _last_drawn(rest[: len(rest) - len(last)]) + b"\r" + last


class TerminalView(View):
    """All as it comes, also a progress bar, which moves; the last part after a moment."""

    def feed(self, data: bytes) -> None:
        text = self._rest + data
        end = max(text.rfind(b"\n") + 1, text.rfind(b"\r"))
        if end > 0:
            self._write(text[:end])
        self._rest = text[end:]
        if len(self._rest) > MAX_LINE:
            self.show_due()
        elif not self._rest:
            self._due = _NEVER
        elif end > 0 or self._due == _NEVER:
            self._due = time.monotonic() + _TERMINAL_DELAY_S

    def show_due(self) -> None:
        self._due = _NEVER
        self._write(self._rest)
        self._rest = b""

    def finish(self) -> None:
        if self._rest:
            self._write(self._rest + b"\n")
        self._rest = b""
