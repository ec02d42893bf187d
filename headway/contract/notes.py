"""Lines on stderr for the person who runs a script or a command: all of Headway's begin alike."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_said: set[str] = set()


def line_of(text: str) -> str:
    """Return a text as the line that `say` writes."""
    return f"headway: {text}\n"


def say(text: str) -> None:
    """Write a line on stderr, if it can be written to: what goes on does so without."""
    stream = sys.stderr or sys.stdout  # None where it was closed
    if stream is not None:
        with suppress(OSError, RuntimeError):  # amid another line, in a signal's handler
            stream.write(line_of(text))
            stream.flush()


def say_once(text: str) -> None:
    """Write a line, unless this process has written it before."""
    if text not in _said:
        _said.add(text)
        say(text)


def say_amid_writing(text: str) -> None:
    """Write a line also where a signal's handler has interrupted another write."""
    with suppress(OSError):
        os.write(2, line_of(text).encode())
