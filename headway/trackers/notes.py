"""Notes on stderr about what trackers leave out, each once."""

from __future__ import annotations

import sys

_said: set[str] = set()


def note_once(text: str) -> None:
    """Print a note, unless this process has printed it before."""
    if text not in _said:
        _said.add(text)
        print(f"headway: {text}", file=sys.stderr, flush=True)
