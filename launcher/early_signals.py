"""What signals to the launcher do until its ranks have started, to which they are forwarded."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headway.contract import signals
from headway.contract.notes import say

if TYPE_CHECKING:
    from headway.launcher.processes.starter import Starter


def outlive_early_signals() -> None:
    """Print that the user's signals come too early, such as those of sbatch --signal=USR1@60."""
    from headway.launcher.rank.worker import USER_SIGNALS

    signals.trap(signals.say_too_early, *USER_SIGNALS)


@contextmanager
def interrupts_exit_at_once(starter: Starter) -> Iterator[None]:
    """Exit on Ctrl-C without an exception, which numpy and torch swallow during their imports."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def end(*_: object) -> None:
        signals.ignore(signal.SIGINT)
        starter.close()
        say("interrupted")
        os._exit(130)

    with signals.trapped(end, *([signal.SIGINT] if is_usual else [])):
        yield
