"""What the kernel says about a process: what its main thread does; on Linux only, from /proc."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from headway.launcher.diagnosis.torch_messages import STATE, STATES, STOPPED_STATES


class ProcessState(NamedTuple):
    letter: str = ""  # as in ps(1); empty: not known
    waits_in: str = ""  # the function of the kernel; empty: in none, or not known

    @property
    def is_stopped(self) -> bool:
        return self.letter in STOPPED_STATES

    def __str__(self) -> str:
        place = f", in the kernel's {self.waits_in}" if self.waits_in else ""
        return STATES.get(self.letter, "in an unknown state") + place


def read_state(pid: int) -> ProcessState:
    letter = waits_in = ""
    with suppress(OSError), open(f"/proc/{pid}/wchan", encoding="ascii", errors="replace") as file:
        waits_in = file.read().strip()
    with suppress(OSError), open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        rows = dict(line.split(":", 1) for line in file)
        letter = rows[STATE].strip()[:1]
    return ProcessState(letter, "" if waits_in == "0" else waits_in)
