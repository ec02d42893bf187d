"""What the kernel says about a process: what its main thread does, and whether it handles SIGQUIT.

Known on Linux only, from /proc.
"""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from typing import NamedTuple

from headway.launcher.diagnosis.torch_messages import (
    CAUGHT_SIGNALS,
    STATE,
    STATES,
    STOPPED_STATES,
)


class ProcessState(NamedTuple):
    """What the main thread of a process does."""

    letter: str = ""  # as in ps(1); empty: not known
    waits_in: str = ""  # the function of the kernel; empty: in none, or not known

    @property
    def is_stopped(self) -> bool:
        return self.letter in STOPPED_STATES

    def __str__(self) -> str:
        place = f", in the kernel's {self.waits_in}" if self.waits_in else ""
        return STATES.get(self.letter, "in an unknown state") + place


def read_state(pid: int) -> ProcessState:
    """Return what the main thread of process `pid` does at this moment."""
    status = _status_of(pid)
    waits_in = ""
    with suppress(OSError), open(f"/proc/{pid}/wchan", encoding="ascii", errors="replace") as file:
        waits_in = file.read().strip()
    return ProcessState(
        letter=status.get(STATE, "")[:1],
        waits_in="" if waits_in == "0" else waits_in,
    )


def handles_quit(pid: int) -> bool:
    """Return whether a process has a handler for SIGQUIT, which ends it otherwise.

    Without Linux the answer is yes.
    """
    if sys.platform != "linux":
        return True
    return bool(int(_status_of(pid).get(CAUGHT_SIGNALS, "0"), 16) >> (signal.SIGQUIT - 1) & 1)


def _status_of(pid: int) -> dict[str, str]:
    """Return the rows of /proc/PID/status; none where the process is gone, or without Linux."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            rows = [line.split(":", 1) for line in file]
    except OSError:
        return {}
    return {row[0]: row[1].strip() for row in rows}
