"""Logging to stderr, and formatting of ranks and sizes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

_logged: set[str] = set()
_logged_at = 0.0


def line_of(text: str) -> str:
    """Return the line that `log` writes for `text`."""
    return f"headway: {text}\n"


def _end_bar() -> str:
    """Return a newline if tqdm has drawn a progress bar on stderr since the last call."""
    global _logged_at
    before, _logged_at = _logged_at, time.time()
    bars = getattr(getattr(sys.modules.get("tqdm.std"), "tqdm", None), "_instances", ())
    ours = [bar for bar in list(bars) if getattr(bar, "fp", None) == sys.stderr]
    return "\n" if any(getattr(bar, "last_print_t", 0) > before for bar in ours) else ""


def flush_streams() -> None:
    """Flush stdout and stderr; ignore a stream that is not writable."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()


def shown(text: str) -> str:
    """Return a script's text for use in a one-line message, with control characters escaped."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def log(text: str) -> None:
    """Write a line to stderr; discard the line if stderr is not writable."""
    stream = sys.stderr or sys.stdout  # None if closed
    if stream is not None:
        with suppress(OSError, RuntimeError):  # a signal handler interrupted a write
            stream.write(_end_bar() + line_of(text))
            stream.flush()


def log_once(text: str) -> None:
    if text not in _logged:
        _logged.add(text)
        log(text)


def log_in_handler(text: str) -> None:
    """Write a line to stderr, even in a signal handler that interrupted another write."""
    with suppress(OSError, RuntimeError):  # another thread creates a progress bar
        os.write(2, (_end_bar() + line_of(text)).encode())


def ranges(ranks: Iterable[int]) -> str:
    """Return "0, 2-7" for 0, 2, 3, 4, 5, 6, 7."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)


def named(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0, 2-7"."""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"


SILENT_S = 1.0
"""Seconds after which a wait is logged on a terminal."""
_SILENT_FACTOR = 5  # elsewhere


@contextmanager
def waiting_for(
    what: str, *, is_quiet: bool = False, after_s: float | None = None
) -> Iterator[None]:
    """Log `headway: waiting for ...` to stderr if the block takes longer than `after_s` seconds.

    The default is `SILENT_S` on a terminal, and 5 times as long elsewhere.
    """
    import threading  # not needed to launch a single process

    if after_s is None:
        after_s = SILENT_S * (1 if sys.stderr.isatty() else _SILENT_FACTOR)
    timer = threading.Timer(after_s, log, [f"waiting for {what}"])
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
    """Format a number of bytes, as in "31.42 GiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.1f} {unit}" if unit != "B" else f"{nbytes} B"
        value /= 1024
    return f"{value:.2f} GiB"
