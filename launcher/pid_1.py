"""A minimal init for a launcher that runs as PID 1, for example in a container.

The kernel does not apply default signal actions to PID 1, so a script without handlers would ignore
SIGTERM. PID 1 must also reap the container's orphans, which would otherwise remain zombies.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

from headway.ipc import signals
from headway.ipc.forking import reap

_NOT_FORWARDED = {
    signal.SIGCHLD,
    signal.SIGTTIN,
    signal.SIGTTOU,
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP),
}


def leave_pid_1() -> None:
    """Fork, and return in the child; the parent remains PID 1.

    Until the child exits, the parent forwards signals and reaps orphans. The child gets a new
    process group in the terminal's foreground, so it receives Ctrl-C only once.
    """
    forwarded = signal.valid_signals() - _NOT_FORWARDED
    awaited = {*forwarded, signal.SIGCHLD}
    signals.reset_handlers(signal.SIGCHLD)  # the kernel does not send an ignored SIGCHLD
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        if sys.__stdin__ is not None and sys.__stdin__.isatty():
            with signals.trapped(signal.SIG_IGN, signal.SIGTTOU), suppress(OSError):
                os.tcsetpgrp(0, os.getpid())
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        number = signal.sigwait(awaited)
        if number != signal.SIGCHLD:
            with suppress(ProcessLookupError):
                os.kill(child, number)
            continue
        for pid, status in reap():
            if pid == child:
                os._exit(signals.shell_exit_code(os.waitstatus_to_exitcode(status)))
