"""Set, ignore, restore and reset signal handlers.

As with `signal.signal`, only the main thread of the main interpreter can set handlers.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from headway.ipc.stderr import log, log_in_handler

Handler = Any
"""A function of the signal number and the frame, or signal.SIG_DFL or signal.SIG_IGN."""


def trap(handler: Handler, *numbers: int) -> dict[int, Handler]:
    """Set a handler for these signals; return the previous handlers.

    A signal that is ignored with SIG_IGN remains ignored after an exec.
    """
    return {number: signal.signal(number, handler) for number in numbers}


def restore_handlers(before: Mapping[int, Handler]) -> None:
    """Restore handlers, except handlers set from C, which Python cannot restore."""
    for number, handler in before.items():
        if handler is not None:
            signal.signal(number, handler)


@contextmanager
def trapped(handler: Handler, *numbers: int) -> Iterator[dict[int, Handler]]:
    """Set a handler for these signals during the block; yield the previous handlers."""
    before = trap(handler, *numbers)
    try:
        yield before
    finally:
        restore_handlers(before)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)
PREEMPTION_SIGNALS = (*STOP_SIGNALS, signal.SIGUSR1)


@contextmanager
def collect_signals(*numbers: int) -> Iterator[list[int]]:
    """Collect signals that are not ignored; a second SIGINT interrupts the block."""
    received: list[int] = []

    def note(number: int, _: object) -> None:
        if number == signal.SIGINT and number in received:
            raise KeyboardInterrupt
        received.append(number)

    before: dict[int, Handler] = {}
    with suppress(ValueError):  # only the main thread can set handlers
        before = trap(note, *(sig for sig in numbers if signal.getsignal(sig) != signal.SIG_IGN))
    try:
        yield received
    finally:
        restore_handlers(before)


def ignore_until_exec(*numbers: int) -> None:
    """Ignore signals until an exec, which resets Python handlers but not SIG_IGN.

    The signals still interrupt system calls.
    """
    trap(lambda *_: None, *numbers)


def reset_handlers(*numbers: int) -> None:
    """Restore Python's default handlers for these signals."""
    for number in numbers:
        trap(signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL, number)


def is_default_handler(handler: Handler) -> bool:
    """Return whether Python or the `headway` command sets this handler at startup."""
    return handler in (signal.SIG_DFL, signal.default_int_handler, exit_on_signal)


class SignalSafeEvent:
    """An event that signal handlers can set, and that `wait` clears.

    A handler cannot set a threading.Event, because the interrupted thread may hold the event's
    lock. Before Python 3.13, `queue.SimpleQueue.get(timeout=...)` waits forever if a handler takes
    longer than the remaining timeout.
    """

    def __init__(self) -> None:
        import threading  # not needed to launch a single process

        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        with suppress(RuntimeError):  # already set
            self._lock.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the event is set, then clear it; return False on a timeout."""
        return self._lock.acquire(timeout=timeout_s)


def exit_on_signal(number: int, _: object = None) -> NoReturn:
    """Handle a stop signal: log it and raise SystemExit, so that child processes are terminated."""
    log_in_handler(f"stopped by {signal.Signals(number).name}")
    raise SystemExit(128 + number)


def log_early_stop(number: int, _: object = None) -> None:
    """Handle a signal that arrived before the ranks started: log that it is not forwarded."""
    name = signal.Signals(number).name
    log(f"{name} arrived before the ranks started and is not forwarded to them")


def shell_exit_code(code: int) -> int:
    """Convert a process's exit code to the shell's code: 128+n instead of -n for signal n."""
    return code if code >= 0 else 128 - code
