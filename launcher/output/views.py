"""Shows a rank's stream on the console: unchanged, as lines, or with an animated progress bar."""

from __future__ import annotations

import re
import time

from headway.launcher.diagnosis.torch_messages import RANK_PREFIX
from headway.launcher.output.console import Console

MAX_LINE = 2**20  # bytes; longer lines are shown in pieces
_TERMINAL_DELAY_S = 0.1  # before an unfinished line is shown on a terminal
_FILE_DELAY_S = 1.0  # before an unfinished line is shown elsewhere
_BAR_INTERVAL_S = 10.0  # between two states of a progress bar, except on a terminal
_NEVER = float("inf")
_CUT = re.compile(rb"([\xc2-\xf4]|[\xe0-\xf4][\x80-\xbf]|[\xf0-\xf4][\x80-\xbf]{2})\Z")  # UTF-8
_UP = b"\x1b[A"  # multiple bars move up with this sequence, and down with line feeds
_WENT_UP = re.compile(rb"(?:\x1b\[A)+(?!\x1b|\Z)")


def make_view(console: Console, rank: int, target: int) -> View | None:
    """Return the view of a rank's stdout (1) or stderr (2); None if the rank is hidden."""
    if not console.is_shown(rank):
        return None
    if console.is_raw:
        return View(console, rank, target)
    if not console.is_terminal(target):
        return FileView(console, rank, target, _FILE_DELAY_S, _BAR_INTERVAL_S)
    if rank == console.first_rank:
        return TerminalView(console, rank, target)
    return FileView(console, rank, target, _TERMINAL_DELAY_S, _NEVER)


class View:
    """Shows a rank's output; this base class forwards it unchanged."""

    def __init__(self, console: Console, rank: int, target: int) -> None:
        self._console = console
        self._rank = rank
        self._target = target
        self._rest = b""  # the unfinished last line
        self.due = _NEVER  # the monotonic time at which to call `show_due`
        torchs_prefix = RANK_PREFIX.format(rank=rank).encode()
        self._torchs_prefixes = re.compile(rb"(?m)^(?:%s ?)+" % re.escape(torchs_prefix))

    def feed(self, data: bytes) -> None:
        self._console.forward(self._target, data)

    def show_due(self) -> None:
        """Show an unfinished line after its delay."""

    def finish(self) -> None:
        """Show the remaining output after the end of the stream."""

    def _write_rest(self) -> None:
        """Show the unfinished line, without the incomplete character at its end."""
        if whole := _CUT.sub(b"", self._rest):
            self._write(whole)
            self._rest = self._rest[len(whole) :]

    def _write(self, text: bytes, *, is_new: bool = False) -> None:
        """Show text; drop torch's rank prefix from tracebacks if lines are already prefixed."""
        if self._target == 2 and self._console.is_prefixed and b"[" in text:
            text = self._torchs_prefixes.sub(b"", text)
        self._console.write(self._rank, self._target, text, is_new=is_new)


class FileView(View):
    """Shows whole lines at once, and unfinished lines and progress bars after a delay.

    A progress bar is a line with carriage returns; only its last state is shown. Several bars, one
    below another, are handled as one line.
    """

    def __init__(
        self, console: Console, rank: int, target: int, unfinished_s: float, bar_s: float
    ) -> None:
        super().__init__(console, rank, target)
        self._unfinished_s, self._bar_s = unfinished_s, bar_s
        self._shown_state = b""  # of the progress bar
        self._shown_at = 0.0

    def feed(self, data: bytes) -> None:
        text = self._rest + data
        if b"\x1b" in text:  # searching for one byte is 100 times faster
            while _UP + b"\n" in text:
                text = text.replace(_UP + b"\n", b"")
            text = _WENT_UP.sub(b"\r", text)
        end = text.rfind(b"\n") + 1
        if end:
            self._show_lines(text[:end])
            self.due = _NEVER
        self._rest = _last_state(text[end:])
        if len(self._rest) > MAX_LINE:
            self.show_due()
        elif self._rest and self.due == _NEVER:
            self.due = time.monotonic() + self._unfinished_s
            if _is_bar(self._rest):
                self.due = max(self.due, self._shown_at + self._bar_s)

    def show_due(self) -> None:
        self.due = _NEVER
        if b"\r" not in self._rest or len(self._rest) > MAX_LINE:
            self._write_rest()
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
    """Return whether the line contains a carriage return before its end."""
    return b"\r" in line.removesuffix(b"\r")


def _last_drawn(line: bytes) -> bytes:
    """Return the last state drawn in a line, ignoring blanks that only erase a state."""
    states = (word.replace(_UP, b"") for word in reversed(line.split(b"\r")))
    return next((state for state in states if state.strip()), b"")


def _last_state(rest: bytes) -> bytes:
    if not _is_bar(rest):
        return rest
    last = rest.rpartition(b"\r")[2]
    return b"\r" + _last_drawn(rest[: len(rest) - len(last)]) + b"\r" + last


class TerminalView(View):
    """Shows whole lines and animated progress bars at once, and unfinished lines after a delay."""

    def feed(self, data: bytes) -> None:
        text = self._rest + data
        end = max(text.rfind(b"\n") + 1, text.rfind(b"\r"))
        if end > 0:
            self._write(text[:end])
        self._rest = text[end:]
        if len(self._rest) > MAX_LINE:
            self.show_due()
        elif not self._rest:
            self.due = _NEVER
        elif end > 0 or self.due == _NEVER:
            self.due = time.monotonic() + _TERMINAL_DELAY_S

    def show_due(self) -> None:
        self.due = _NEVER
        self._write_rest()

    def finish(self) -> None:
        if self._rest:
            self._write(self._rest + b"\n")
        self._rest = b""
