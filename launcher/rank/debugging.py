"""For `--debug-rank` and breakpoint(): the terminal, and process groups without timeouts.

The rank reads and writes the launcher's terminal directly. It has its own session, so that
Ctrl-C reaches only the launcher, which forwards it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from headway.ipc import signals

DOUBLE_PRESS_S = 1.0
"""Two Ctrl-C within so long end the run; a debugger needs single ones, to interrupt the script."""

_NO_TIMEOUT = timedelta(weeks=3)  # in milliseconds it fits into the 32 bits of poll(2)


def breakpoint_variables(rank: int, debug_rank: int | None) -> dict[str, str]:
    """Return what disables breakpoint() in all ranks but the debugged one; see `skip_prompts`."""
    return {} if debug_rank in (None, rank) else {"PYTHONBREAKPOINT": "0"}


@contextmanager
def borrowed_terminal() -> Iterator[None]:
    """Lend a rank the terminal, restore its modes, ignore Ctrl-Z, which would stop the launcher."""
    if not os.isatty(0):
        yield
        return
    import termios

    modes = termios.tcgetattr(0)
    # without SIGTTOU, a launcher in the background would be stopped when it sets the modes
    before = signals.ignore(signal.SIGTSTP, signal.SIGTTOU)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal has been closed
            termios.tcsetattr(0, termios.TCSADRAIN, modes)
        signals.restore_handlers(before)


def skip_prompts() -> None:
    """Disable the `set_trace()` of pdb, IPython and pudb, which all call this method of `bdb`."""
    import bdb

    bdb.Bdb.set_trace = lambda *_, **__: None  # type: ignore[method-assign]


def suspend_timeouts() -> None:
    """Give this rank's process groups no timeout, so that they wait for a rank at a prompt.

    Timeouts that the script passes to init_process_group and new_group itself stay in force.
    Relies on two private names of torch, which hold the timeouts that it uses by default.
    """
    from torch.distributed import distributed_c10d

    vars(distributed_c10d).update(
        default_pg_timeout=_NO_TIMEOUT, default_pg_nccl_timeout=_NO_TIMEOUT
    )
