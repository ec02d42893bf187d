"""Signals for one process alone: its number may be another process's once it has been reaped."""

from __future__ import annotations

import os
import signal
from contextlib import suppress


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that stays this process's, and is readable once it has ended.

    None where the system has no such descriptors, or no such process.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not on Linux; an old kernel, a sandbox
        return None


class ProcessHandle:
    """A process of another parent, by its descriptor, else by its number and its start time."""

    def __init__(self, pid: int) -> None:
        self._fd = open_pidfd(pid)
        self.process = None
        if self._fd is None:
            import psutil

            with suppress(psutil.NoSuchProcess):
                self.process = psutil.Process(pid)

    def send(self, number: int) -> None:
        """Send a signal; does nothing once the process has ended."""
        fd, process = self._fd, self.process  # another thread may close the handle meanwhile
        if fd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)
        elif process is not None:
            import psutil

            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def close(self) -> None:
        """Give the descriptor back; nothing is sent any more."""
        fd, self._fd, self.process = self._fd, None, None
        if fd is not None:
            os.close(fd)
