"""The handlers of this process's signals: trapped, ignored, put back, or as Python begins with.

Only the main thread of the main interpreter may set them, as it is with `signal.signal`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from headway.ipc.stderr import log, log_in_handler

Handler = Any
"""A function of a number and a frame, or one of signal.SIG_DFL and SIG_IGN."""


def trap(handler: Handler, *numbers: int) -> dict[int, Handler]:
    return {number: signal.signal(number, handler) for number in numbers}


def restore_handlers(before: Mapping[int, Handler]) -> None:
    """Restore handlers, except those in C, which Python does not know."""
    for number, handler in before.items():
        if handler is not None:
            signal.signal(number, handler)


@contextmanager
def trapped(handler: Handler, *numbers: int) -> Iterator[dict[int, Handler]]:
    """Set the handler of these signals in the block, which gets the earlier ones."""
    before = trap(handler, *numbers)
    try:
        yield before
    finally:
        restore_handlers(before)


STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # of a training


@contextmanager
def held(*numbers: int) -> Iterator[list[int]]:
    """Collect those of these signals that come, unless ignored; a second SIGINT interrupts."""
    came: list[int] = []

    def note(number: int, _: object) -> None:
        if number == signal.SIGINT and number in came:
            raise KeyboardInterrupt
        came.append(number)

    before: dict[int, Handler] = {}
    with suppress(ValueError):  # in another thread, which runs no handlers
        before = trap(note, *(sig for sig in numbers if signal.getsignal(sig) != signal.SIG_IGN))
    try:
        yield came
    finally:
        restore_handlers(before)


def ignore(*numbers: int) -> dict[int, Handler]:
    """Ignore these signals, also in executed programs, and return the earlier handlers."""
    return trap(signal.SIG_IGN, *numbers)


def outlive(*numbers: int) -> None:
    """Survive these signals, which still wake a wait; executed programs do not inherit it.

    An exec resets a handler in Python, but not SIG_IGN.
    """
    trap(lambda *_: None, *numbers)


def reset_handlers(*numbers: int) -> None:
    """Restore Python's initial handlers of these signals."""
    for number in numbers:
        trap(signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL, number)


def is_default_handler(handler: Handler) -> bool:
    """Return whether a handler is one that Python or the `headway` command starts with."""
    return handler in (signal.SIG_DFL, signal.default_int_handler, exit_on_signal)


class Bell:
    """Wakes the one thread that waits; any thread and any signal handler may ring it.

    A handler cannot set a threading.Event: the interrupted thread may hold its lock. And before
    Python 3.13, `queue.SimpleQueue.get(timeout=...)` waits without end once a handler has taken
    longer than what was left of the timeout.
    """

    def __init__(self) -> None:
        import threading  # a launch of one process waits for nothing

        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        with suppress(RuntimeError):  # it rings already
            self._silence.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it rings, or has rung since the last wait; return whether it has."""
        return self._silence.acquire(timeout=timeout_s)


def exit_on_signal(number: int, _: object = None) -> NoReturn:
    """Report a stop signal and raise SystemExit, which ends child processes; a handler."""
    log_in_handler(f"stopped by {signal.Signals(number).name}")
    raise SystemExit(128 + number)


def log_early_stop(number: int, _: object = None) -> None:
    """Print that a signal came before there were ranks to forward it to; usable as a handler."""
    name = signal.Signals(number).name
    log(f"{name} came before the ranks had started, and is not sent on to them")


def shell_code(code: int) -> int:
    """Return a process's exit code as shells do: 128+n for signal n, which is -n."""
    return code if code >= 0 else 128 - code
