"""What the console shows of one stream of a rank: as it is, as lines, or as a moving terminal."""

from __future__ import annotations

import re
import time

from headway.launcher.diagnosis.torch_messages import RANK_PREFIX
from headway.launcher.output.console import Console

LONGEST = 2**20  # bytes; a longer line is shown in pieces
_IDLE_S = 0.1  # an unfinished line that stops growing is shown on a terminal after this
_UNFINISHED_S = 1.0  # and elsewhere after this, though it grows
_BAR_S = 10.0  # between two states of a progress bar, where there is no terminal
_NEVER = float("inf")
_UP = b"\x1b[A"  # what bars below each other write to go up a line; they go down by line feeds
_WENT_UP = re.compile(rb"(?:\x1b\[A)+(?!\x1b|\Z)")
_REDRAWN = re.compile(rb"[^\n]*\r(?!\n)")  # what a carriage return has the rest of a line replace


def view_of(console: Console, rank: int, target: int) -> View | None:
    """Return the view of a rank's stdout (1) or stderr (2); None if it is not shown."""
    if not console.shows(rank):
        return None
    if console.is_raw:
        return View(console, rank, target)
    if console.is_terminal(target):
        return TerminalView(console, rank, target)
    return FileView(console, rank, target)


class View:
    """Shows what a rank writes: here, every byte as it comes."""

    def __init__(self, console: Console, rank: int, target: int) -> None:
        self._console = console
        self._rank = rank
        self._target = target
        self._rest = b""  # of the last line, which is unfinished
        torchs_prefix = RANK_PREFIX.text.format(rank=rank).encode()
        self._torchs_prefixes = re.compile(rb"(?m)^(?:%s ?)+" % re.escape(torchs_prefix))

    def take(self, data: bytes) -> None:
        """Take what the rank has written next."""
        self._console.pass_on(self._target, data)

    @property
    def due(self) -> float:
        """When `show_due` has something to show, on the monotonic clock."""
        return _NEVER

    def show_due(self) -> None:
        """Show what has waited long enough to be finished."""

    def finish(self) -> None:
        """Show what is left: no more will come."""

    def _without_torchs_prefix(self, lines: bytes) -> bytes:
        """Remove the rank that torch puts before the lines of a traceback, where we put it too."""
        if self._target != 2 or not self._console.is_prefixed or b"[" not in lines:
            return lines
        return self._torchs_prefixes.sub(b"", lines)


class FileView(View):
    """Whole lines at once, an unfinished one after a second, a progress bar every ten seconds.

    A bar is a line with carriage returns: each replaces what was drawn before. Its last state is
    always shown. Of several bars below each other, the newest state of any of them is shown.
    """

    def __init__(self, console: Console, rank: int, target: int) -> None:
        super().__init__(console, rank, target)
        self._began_at = _NEVER  # the unfinished line
        self._is_in_bar = False  # the unfinished line is a bar, and begins with a carriage return
        self._state = b""  # of a bar, not shown yet
        self._state_due = _NEVER
        self._shown_state = b""
        self._shown_at = -_BAR_S

    @property
    def due(self) -> float:
        return min(self._began_at + _UNFINISHED_S, self._state_due)

    def take(self, data: bytes) -> None:
        text = self._rest + data
        if b"\x1b" in text:  # a search for one byte is a hundred times faster than for more
            text = _without_moves(text)
        end = text.rfind(b"\n") + 1
        if end:
            self._show_lines(text[:end])
            self._began_at = _NEVER
            self._is_in_bar = False
        self._rest = text[end:]
        if b"\r" in self._rest[:-1]:  # a last one may be half of an end of line
            self._note_state()
        if len(self._rest) > LONGEST:
            self._show_unfinished()
        if not self._rest or self._is_in_bar:
            self._began_at = _NEVER
        elif self._began_at == _NEVER:
            self._began_at = time.monotonic()

    def show_due(self) -> None:
        now = time.monotonic()
        if self._began_at + _UNFINISHED_S <= now:
            if b"\r" in self._rest:
                self._note_state()
            else:
                self._show_unfinished()
            self._began_at = _NEVER
        if self._state_due <= now:
            self._show_state()

    def finish(self) -> None:
        if b"\r" in self._rest:
            self._note_state()
        elif self._rest:
            self._show_lines(self._rest + b"\n")
        if self._state:
            self._show_state()
        self._rest = b""

    def _show_lines(self, lines: bytes) -> None:
        is_new = False
        if self._is_in_bar or _has_states(lines):
            first, _, others = lines.partition(b"\n")
            is_new = self._is_in_bar or b"\r" in first[:-1]
            lines = self._end_of_bar(first) if is_new else first + b"\n"
            lines += _REDRAWN.sub(b"", others)
        if lines:
            lines = self._without_torchs_prefix(lines)
            self._console.write_lines(self._rank, self._target, lines, is_new=is_new)

    def _end_of_bar(self, line: bytes) -> bytes:
        """Return what is to be shown of a bar's last line: nothing if that has been shown."""
        *states, last = line.split(b"\r")
        self._note_states(states)
        if last.isspace() or (last and states[-1].isspace()):  # the bar has been erased
            return last.strip() and last + b"\n"
        last = last or self._state
        is_shown = last == self._shown_state
        self._forget_state()
        self._shown_state = b""
        return last + b"\n" if last and not is_shown else b""

    def _note_state(self) -> None:
        """Remember the newest state in the unfinished line, and forget those before."""
        self._is_in_bar = True
        *states, last = self._rest.split(b"\r")
        self._note_states([*states, last])
        erased = [states[-1]] if states[-1].isspace() else []
        self._rest = b"\r" + b"\r".join([*erased, last])

    def _note_states(self, states: list[bytes]) -> None:
        states = [state.replace(_UP, b"") for state in states]
        drawn = next((state for state in reversed(states) if state.strip()), b"")
        if drawn and drawn != self._shown_state:
            self._state = drawn
            if self._state_due == _NEVER:
                soon = min(self._began_at, time.monotonic()) + _UNFINISHED_S
                self._state_due = max(soon, self._shown_at + _BAR_S)

    def _show_state(self) -> None:
        line = self._without_torchs_prefix(self._state + b"\n")
        self._console.write_lines(self._rank, self._target, line, is_new=True)
        self._shown_state, self._shown_at = self._state, time.monotonic()
        self._forget_state()

    def _forget_state(self) -> None:
        self._state = b""
        self._state_due = _NEVER

    def _show_unfinished(self) -> None:
        self._console.write_piece(self._rank, self._target, self._without_torchs_prefix(self._rest))
        self._rest = b""


def _without_moves(text: bytes) -> bytes:
    """Turn moves to the line above into carriage returns, and remove those that go down again.

    One after text that is no bar ends its line: a terminal leaves the text where it is.
    """
    while _UP + b"\n" in text:
        text = text.replace(_UP + b"\n", b"")

    def end(move: re.Match[bytes]) -> bytes:
        line = text[text.rfind(b"\n", 0, move.start()) + 1 : move.start()]
        return b"\n" if line.strip() and b"\r" not in line else b"\r"

    return _WENT_UP.sub(end, text)


def _has_states(lines: bytes) -> bool:
    """Return whether there is a carriage return that does not belong to the end of a line."""
    return b"\r" in lines and lines.count(b"\r") > lines.count(b"\r\n")


class TerminalView(View):
    """Lines that may be merged with those of other ranks, and one rank's progress bar."""

    def __init__(self, console: Console, rank: int, target: int) -> None:
        super().__init__(console, rank, target)
        self._began_at = 0.0  # the unfinished line
        self._read_at = 0.0

    @property
    def due(self) -> float:
        if not self._rest:
            return _NEVER
        return min(self._read_at + _IDLE_S, self._began_at + _UNFINISHED_S)

    def take(self, data: bytes) -> None:
        self._read_at = time.monotonic()
        if not self._rest or b"\n" in data:
            self._began_at = self._read_at
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._show_line(line)
        if b"\r" in self._rest[1:]:
            drawn, _, last = self._rest.rpartition(b"\r")
            if self._console.may_draw(self._rank):
                self._console.write_piece(self._rank, self._target, drawn)
            self._rest = b"\r" + last
        if len(self._rest) > LONGEST:
            self._show_unfinished()

    def show_due(self) -> None:
        if not self._rest.startswith(b"\r") or self._console.may_draw(self._rank):
            self._show_unfinished()
        else:
            self._read_at = self._began_at = _NEVER  # until the next state

    def finish(self) -> None:
        if self._rest:
            self._show_line(self._rest)
        self._rest = b""

    def _show_line(self, line: bytes) -> None:
        if b"\r" in line.rstrip(b"\r") and not self._console.may_draw(self._rank):
            line = _REDRAWN.sub(b"", line)
        line = self._without_torchs_prefix(line)
        self._console.write_line(self._rank, self._target, line + b"\n")

    def _show_unfinished(self) -> None:
        self._console.write_piece(self._rank, self._target, self._rest)
        self._rest = b""
