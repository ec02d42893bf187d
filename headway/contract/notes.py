"""Lines on stderr for the person who runs a script."""

from __future__ import annotations

import sys
from contextlib import suppress

_said: set[str] = set()


def say(text: str) -> None:
    """Print a line on stderr, if it is still read: a training goes on without."""
    with suppress(OSError):
        print(f"headway: {text}", file=sys.stderr, flush=True)


def say_once(text: str) -> None:
    """Print a line, unless this process has printed it before."""
    if text not in _said:
        _said.add(text)
        say(text)
