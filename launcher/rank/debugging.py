"""Supports `--debug-rank` and breakpoint(): shares the terminal, and disables timeouts.

The debugged rank reads from and writes to the launcher's terminal directly. It has its own session,
so that Ctrl-C reaches only the launcher, which forwards the signal.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from headway.ipc import signals

DOUBLE_PRESS_S = 1.0
"""Pressing Ctrl-C twice within this time stops the run; pressing it once interrupts the script."""

_NO_TIMEOUT = timedelta(weeks=3)  # fits into the 32-bit milliseconds of poll(2)


def breakpoint_variables(rank: int, debug_rank: int | None) -> dict[str, str]:
    """Return the variable that disables breakpoint() in all ranks except the debugged one."""
    return {} if debug_rank in (None, rank) else {"PYTHONBREAKPOINT": "0"}


@contextmanager
def borrowed_terminal() -> Iterator[None]:
    """Lend the terminal to a rank, and ignore Ctrl-Z here; then restore the terminal's modes."""
    if not os.isatty(0):
        yield
        return
    import termios

    modes = termios.tcgetattr(0)
    # SIGTTOU would suspend a background launcher when it sets the modes
    with signals.trapped(signal.SIG_IGN, signal.SIGTSTP, signal.SIGTTOU):
        try:
            yield
        finally:
            with suppress(termios.error):  # the terminal has been closed
                termios.tcsetattr(0, termios.TCSADRAIN, modes)


def skip_prompts() -> None:
    """Disable `set_trace()` in pdb, IPython and pudb, all of which call `bdb.Bdb.set_trace`."""
    import bdb

    bdb.Bdb.set_trace = lambda *_, **__: None  # type: ignore[method-assign]


def suspend_timeouts() -> None:
    """Disable the default timeouts of process groups, so that they wait for a rank at a prompt.

    Timeouts that the script passes to init_process_group and new_group still apply. This function
    relies on torch's private names for the default timeouts.
    """
    from torch.distributed import distributed_c10d

    vars(distributed_c10d).update(
        default_pg_timeout=_NO_TIMEOUT, default_pg_nccl_timeout=_NO_TIMEOUT
    )
