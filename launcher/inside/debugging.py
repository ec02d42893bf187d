"""What `--debug-rank` needs around breakpoint(): a terminal that is the rank's, and patience.

The rank reads and writes the launcher's terminal itself. It is in a session of its own, so that
Ctrl-C reaches the launcher alone, which sends it on.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

_TWICE_S = 1.0
_PATIENCE = timedelta(weeks=3)  # in milliseconds it fits into the 32 bits that poll(2) takes


class CtrlC:
    """Tells the first Ctrl-C, which is the debugged rank's, from a second one within a second."""

    def __init__(self) -> None:
        self._pressed_at = float("-inf")

    def is_second(self) -> bool:
        """Note that it was pressed, and return whether it was shortly before, too."""
        before, self._pressed_at = self._pressed_at, time.monotonic()
        return self._pressed_at - before < _TWICE_S


@contextmanager
def lent_terminal() -> Iterator[None]:
    """Leave the terminal to a rank, and put back the modes that one killed at a prompt leaves.

    Ctrl-Z does nothing meanwhile: it would stop the launcher, while the rank reads on.
    """
    if not os.isatty(0):
        yield
        return
    import termios

    modes = termios.tcgetattr(0)
    # setting the modes would stop a launcher in the background
    ignored = (signal.SIGTSTP, signal.SIGTTOU)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, modes)
        for number, handler in before.items():
            signal.signal(number, handler)


def suspend_timeouts() -> None:
    """Let this rank wait for one that stands at a prompt: its process groups get no timeout.

    Those that the script gives to init_process_group and new_group itself stay in force.
    """
    from torch.distributed import distributed_c10d

    # what torch looks up when it is given none
    vars(distributed_c10d).update(default_pg_timeout=_PATIENCE, default_pg_nccl_timeout=_PATIENCE)
