"""Notes on stderr about trackers."""

from __future__ import annotations

import sys

_said: set[str] = set()


def note(text: str) -> None:
    """Print a note."""
    print(f"headway: {text}", file=sys.stderr, flush=True)


def note_once(text: str) -> None:
    """Print a note, unless this process has printed it before."""
    if text not in _said:
        _said.add(text)
        note(text)
