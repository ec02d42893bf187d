"""What is said on stderr: notes, what is waited for, and how ranks and sizes are named there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

_said: set[str] = set()


def line_of(text: str) -> str:
    """Return a text as the line that `log` writes."""
    return f"headway: {text}\n"


def flush_streams() -> None:
    """Flush stdout and stderr; one that cannot be written to is skipped."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()


def shown(text: str) -> str:
    """Return text from a script for one line of a message: control characters as escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def log(text: str) -> None:
    """Write a line to stderr; ignore a stderr that cannot be written to."""
    stream = sys.stderr or sys.stdout  # None where it was closed
    if stream is not None:
        with suppress(OSError, RuntimeError):  # amid another line, in a signal's handler
            stream.write(line_of(text))
            stream.flush()


def log_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        log(text)


def log_in_handler(text: str) -> None:
    """Write a line, also in a signal handler that has interrupted another write."""
    with suppress(OSError):
        os.write(2, line_of(text).encode())


def ranges(ranks: Iterable[int]) -> str:
    """Return 0, 2-7 for 0, 2, 3, 4, 5, 6, 7."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)


def named(ranks: Sequence[int]) -> str:
    """Return rank 3, or ranks 0, 2-7."""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"


SILENT_S = 1.0
"""How long a wait may last before it is announced."""


@contextmanager
def waiting_for(what: str, *, is_quiet: bool = False) -> Iterator[None]:
    """Print `headway: waiting for ...` on stderr if the block takes longer than `SILENT_S`."""
    import threading  # a launch of one process waits for nothing

    timer = threading.Timer(SILENT_S, log, [f"waiting for {what}"])
    timer.daemon = True
    if not is_quiet:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if not is_quiet:
            timer.join()


def size(nbytes: int) -> str:
    """Return bytes for people: 31.42 GiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.1f} {unit}" if unit != "B" else f"{nbytes} B"
        value /= 1024
    return f"{value:.2f} GiB"
