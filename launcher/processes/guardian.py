"""The guardian: the fork server's parent, which ends what a killed launcher and server leave.

Launcher, guardian and fork server are a chain in which each adopts the orphans of those below. When
any one or two of them are killed, another ends the run: the server when the launcher's socket has
closed, the guardian when the server has ended, the launcher when both have. If all three are killed
at once, the kernel kills the ranks, by their parent-death signals, but not what they have started.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from contextlib import suppress

from headway.contract import signals
from headway.contract.forking import (
    adopt_orphans,
    reap,
    resume_with_parents_end,
    set_title,
    wake_on_child_end,
)
from headway.launcher.processes.process_cleanup import end_descendants
from headway.launcher.processes.shutdown import KILL_MARGIN_S

_MARGIN_S = KILL_MARGIN_S + 5.0  # for the server, to kill what remains after the grace period
_NEVER = float("inf")


def fork_below_guardian(launcher: socket.socket, grace_s: float) -> None:
    """Fork and return in the child; this process becomes its guardian, and ends with its exit code.

    Does nothing where a process cannot adopt orphans. The other end of `launcher` closes when the
    launcher ends, or wants the child to; that then gives other processes `grace_s` seconds to end.
    """
    if not adopt_orphans():
        return
    server = os.fork()
    resume_with_parents_end()  # a suspended one could end nothing
    if server == 0:
        os.setsid()  # what is sent to the guardian's process group does not reach the server
        return
    # a cluster may send them to all
    signals.outlive(signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    # not Headway's or the script's: `pkill -f` of either is no reason to leave processes behind
    set_title(f"guardian of process {os.getppid()}")
    status = _wait(server, launcher, grace_s)
    if status != 0:
        end_descendants(0)
    os._exit(signals.shell_code(os.waitstatus_to_exitcode(status)))


def _wait(server: int, launcher: socket.socket, grace_s: float) -> int:
    """Return the server's wait status; a server that does not end with the launcher is killed."""
    child_ended, _ = wake_on_child_end()
    poll = select.poll()
    poll.register(child_ended, select.POLLIN)
    # the launcher has ended, or has closed its side; its messages are the server's
    poll.register(launcher, select.POLLRDHUP)
    kill_at = _NEVER
    while True:
        for pid, status in reap():
            if pid == server:
                return status
        left_s = kill_at - time.monotonic()
        if left_s <= 0:
            os.kill(server, signal.SIGKILL)
            kill_at = _NEVER
            continue
        for fd, _ in poll.poll(None if left_s == _NEVER else left_s * 1000):
            if fd == child_ended:
                with suppress(BlockingIOError):
                    os.read(child_ended, 4096)
            else:
                poll.unregister(fd)
                os.kill(server, signal.SIGCONT)  # a suspended one could end nothing
                os.kill(server, signal.SIGTERM)  # ends one that has started no rank yet
                kill_at = time.monotonic() + grace_s + _MARGIN_S
