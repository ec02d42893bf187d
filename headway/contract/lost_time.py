"""What this thread loses to its machine: a core that others have, or a CPU quota that is used up.

Linux counts it; elsewhere it is 0. Sources: the kernel's sched-stats.rst, cgroup-v2.rst, and for
cgroup v1 sched-bwc.rst.
"""

from __future__ import annotations

from typing import NamedTuple

_WAITED = "/proc/thread-self/schedstat"


class Lost(NamedTuple):
    """What the thread could not use of its time, in seconds."""

    stolen: float  # it was ready to run, and did not
    throttled: float  # of that, at most: its cgroup had used up its CPU quota


class LostTime:
    """Counts what the calling thread loses.

    Attributes:
        quota_file: a cgroup's `cpu.stat`; empty if this process has no CPU quota.
    """

    def __init__(self) -> None:
        self.quota_file = ""
        self._before = Lost(0.0, 0.0)

    def take(self) -> Lost:
        """Return what was lost since the last time, or since the thread began."""
        before = self._before
        self._before = now = Lost(_stolen(before.stolen), self._throttled(before.throttled))
        stolen, throttled = (max(a - b, 0.0) for a, b in zip(now, before, strict=True))
        return Lost(stolen, min(throttled, stolen))  # the quota's is added up over cores

    def _throttled(self, otherwise: float) -> float:
        if not self.quota_file:
            return otherwise
        try:
            with open(self.quota_file, "rb") as file:
                words = file.read().split()
            if b"throttled_usec" in words:  # cgroup v2
                return int(words[words.index(b"throttled_usec") + 1]) / 1e6
            return int(words[words.index(b"throttled_time") + 1]) / 1e9
        except (OSError, ValueError, IndexError):
            return otherwise


def _stolen(otherwise: float) -> float:
    try:
        with open(_WAITED, "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return otherwise
