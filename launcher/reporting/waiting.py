"""Says what is waited for, once a wait has lasted a second."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headway.contract.notes import say

SILENT_S = 1.0
"""How long a wait may last before it is announced."""


@contextmanager
def waiting_for(what: str, *, is_quiet: bool = False) -> Iterator[None]:
    """Print `headway: waiting for ...` on stderr if the block takes longer than `SILENT_S`.

    Args:
        what: what is waited for, as the end of that line.
        is_quiet: print nothing.
    """
    timer = threading.Timer(SILENT_S, announce, [what])
    timer.daemon = True
    if not is_quiet:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if not is_quiet:
            timer.join()


def announce(what: str) -> None:
    say(f"waiting for {what}")
