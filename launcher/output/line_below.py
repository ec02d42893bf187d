"""A line below all that a terminal shows: the bytes that draw it, and that take it away again.

It is there only while the cursor is where a line begins, or behind a progress bar, which stays in
place; a prompt has the terminal for itself. So does a shell, while the run is in the background.
"""

from __future__ import annotations

import os
import re

_COLORS = re.compile(rb"\x1b\[[0-9;]*[mK]")
_LONGEST = 4096  # bytes of an unfinished line that are looked at
_SAVE, _RESTORE = b"\x1b7", b"\x1b8"
_TO_LINE_BELOW = b"\x1b[B\r"
_MAKE_ROOM = b"\x1bD\x1b[A"  # scrolls where the cursor is in the last line, and comes back
_ERASE = b"\x1b[J"  # from the cursor on, also what a narrower terminal has wrapped


class LineBelow:
    """One terminal's; used by the thread that writes to it.

    Args:
        fd: of the terminal.

    Attributes:
        text: what is to be there; empty: nothing.
    """

    def __init__(self, fd: int) -> None:
        self.text = ""
        self._fd = fd
        self._rest = b""  # of the unfinished line
        self._to_erase = b""  # while it is drawn

    @property
    def is_left_over(self) -> bool:
        """Whether it is drawn and should not be."""
        return bool(self._to_erase) and not self.text

    def erase(self) -> bytes:
        """Return what takes it away, before something is written; empty if it is not there."""
        bytes_, self._to_erase = self._to_erase, b""
        return bytes_

    def note(self, written: bytes | memoryview) -> None:
        """Take what was written since."""
        self._rest = (self._rest + bytes(written)).rpartition(b"\n")[2][-_LONGEST:]

    def draw(self) -> bytes:
        """Return what draws it, after `erase`; empty where it has no place now."""
        rest = _COLORS.sub(b"", self._rest)
        is_bar = b"\r" in rest and b"\x1b" not in rest
        if not self.text or not (is_bar or not rest) or not self._is_in_foreground():
            return b""
        try:
            columns = os.get_terminal_size(self._fd).columns
        except OSError:  # it has been closed
            return b""
        text = _fit(self.text, max(columns - 1, 0)).encode("ascii", "replace")
        if is_bar:
            self._to_erase = _SAVE + _TO_LINE_BELOW + _ERASE + _RESTORE
            return _MAKE_ROOM + _SAVE + _TO_LINE_BELOW + text + _RESTORE
        self._to_erase = b"\r" + _ERASE
        return text + b"\r"

    def _is_in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:  # it is not the terminal that controls this process
            return False


def _fit(text: str, columns: int) -> str:
    """Leave out parts between the first and the last one, the longest first, until it fits."""
    parts = text.split("  ")
    while len(text) > columns and len(parts) > 2:
        parts.remove(max(parts[1:-1], key=len))
        text = "  ".join(parts)
    return text[:columns]
