"""What signals to the launcher do until its ranks have started, to which they are forwarded."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from headway.contract import signals
from headway.contract.notes import say
from headway.errors import STOP_SIGNALS, Stopped

if TYPE_CHECKING:
    from headway.launcher.processes.starter import Starter


def outlive_early_signals() -> None:
    """Print that the user's signals come too early, such as those of sbatch --signal=USR1@60."""
    from headway.launcher.rank.worker import USER_SIGNALS

    signals.trap(signals.say_too_early, *USER_SIGNALS)


def raise_stopped() -> None:
    """Make stop signals raise `Stopped`; those that are ignored or handled already do not."""
    import threading

    if threading.current_thread() is threading.main_thread():
        usual = [one for one in STOP_SIGNALS if signals.is_usual(signal.getsignal(one))]
        signals.trap(_raise_stopped, *usual)


def stop_as_usual() -> None:
    """Undo `raise_stopped`, where nothing has replaced its handler."""
    ours = [one for one in STOP_SIGNALS if signal.getsignal(one) is _raise_stopped]
    signals.do_as_usual(*ours)


def _raise_stopped(number: int, _: object) -> NoReturn:
    raise Stopped(number)


@contextmanager
def interrupts_exit_at_once(
    starter: Starter, tell: Callable[[Stopped], None] | None = None
) -> Iterator[None]:
    """Exit on Ctrl-C without an exception, which numpy and torch swallow during their imports."""
    raising = (signal.default_int_handler, _raise_stopped)
    usual = [one for one in STOP_SIGNALS if signal.getsignal(one) in raising]

    def end(number: int, _: object) -> None:
        signals.ignore(*usual)
        starter.close()
        stop = Stopped(number)
        say(str(stop))
        if tell is not None:
            tell(stop)
        os._exit(stop.exit_code)

    with signals.trapped(end, *usual):
        yield
