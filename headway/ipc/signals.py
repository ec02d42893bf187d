"""Signal handlers: set, ignore, restore, reset.

As with `signal.signal`, only the main thread of the main interpreter can set them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from headway.ipc.stderr import log, log_in_handler

Handler = Any
"""A function of signal number and frame, or signal.SIG_DFL or SIG_IGN."""


def trap(handler: Handler, *numbers: int) -> dict[int, Handler]:
    return {number: signal.signal(number, handler) for number in numbers}


def restore_handlers(before: Mapping[int, Handler]) -> None:
    """Restore handlers, except those set from C, which Python cannot restore."""
    for number, handler in before.items():
        if handler is not None:
            signal.signal(number, handler)


@contextmanager
def trapped(handler: Handler, *numbers: int) -> Iterator[dict[int, Handler]]:
    """Set a handler for these signals in the block; yield the previous handlers."""
    before = trap(handler, *numbers)
    try:
        yield before
    finally:
        restore_handlers(before)


STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # stop a training


@contextmanager
def held(*numbers: int) -> Iterator[list[int]]:
    """Collect these signals in the block, unless ignored; a second SIGINT interrupts."""
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
    """Ignore these signals, also in exec'd programs; return the previous handlers."""
    return trap(signal.SIG_IGN, *numbers)


def outlive(*numbers: int) -> None:
    """Survive these signals, which still interrupt waits; exec'd programs do not inherit it.

    An exec resets Python handlers, but not SIG_IGN.
    """
    trap(lambda *_: None, *numbers)


def reset_handlers(*numbers: int) -> None:
    """Restore Python's default handlers for these signals."""
    for number in numbers:
        trap(signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL, number)


def is_default_handler(handler: Handler) -> bool:
    """Return whether Python or the `headway` command sets this handler at startup."""
    return handler in (signal.SIG_DFL, signal.default_int_handler, exit_on_signal)


class Bell:
    """Wakes a waiting thread; any thread or signal handler may ring it.

    A handler cannot set a threading.Event, because the interrupted thread may hold its lock. Before
    Python 3.13, `queue.SimpleQueue.get(timeout=...)` waits forever if a handler takes longer than
    the remaining timeout.
    """

    def __init__(self) -> None:
        import threading  # not needed to launch a single process

        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        with suppress(RuntimeError):  # already rung
            self._silence.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait for a ring, including one since the last wait; return whether it rang."""
        return self._silence.acquire(timeout=timeout_s)


def exit_on_signal(number: int, _: object = None) -> NoReturn:
    """Log a stop signal and raise SystemExit, which terminates child processes; a handler."""
    log_in_handler(f"stopped by {signal.Signals(number).name}")
    raise SystemExit(128 + number)


def log_early_stop(number: int, _: object = None) -> None:
    """Log a signal that arrived before there were ranks to forward it to; a handler."""
    name = signal.Signals(number).name
    log(f"{name} arrived before the ranks started and is not forwarded to them")


def shell_code(code: int) -> int:
    """Convert a process's exit code to a shell's: 128+n instead of -n for signal n."""
    return code if code >= 0 else 128 - code
