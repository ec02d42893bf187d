"""The handlers of this process's signals: trapped, ignored, put back, or as Python begins with.

Only the main thread of the main interpreter may set them, as it is with `signal.signal`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headway.contract.notes import say

Handler = Any
"""A function of a number and a frame, or one of signal.SIG_DFL and SIG_IGN."""


def trap(handler: Handler, *numbers: int) -> dict[int, Handler]:
    """Let these signals call a handler, and return what they did before."""
    return {number: signal.signal(number, handler) for number in numbers}


def put_back(before: Mapping[int, Handler]) -> None:
    """Let signals do what they did before, but for a handler in C, which Python does not know."""
    for number, handler in before.items():
        if handler is not None:
            signal.signal(number, handler)


@contextmanager
def trapped(handler: Handler, *numbers: int) -> Iterator[dict[int, Handler]]:
    """Let these signals call a handler in the block, which gets what they did before."""
    before = trap(handler, *numbers)
    try:
        yield before
    finally:
        put_back(before)


def ignore(*numbers: int) -> dict[int, Handler]:
    """Ignore these signals, also in programs that are executed, and return what they did before."""
    return trap(signal.SIG_IGN, *numbers)


def outlive(*numbers: int) -> None:
    """Let these signals end nothing, and wake a wait; programs that are executed do not inherit it.

    A handler in Python is set back by an exec, as the system's own is not.
    """
    trap(lambda *_: None, *numbers)


def do_as_usual(*numbers: int) -> None:
    """Let these signals do what they do when Python begins."""
    for number in numbers:
        trap(signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL, number)


def is_usual(handler: Handler) -> bool:
    """Return whether a handler is one that Python begins with."""
    return handler in (signal.SIG_DFL, signal.default_int_handler)


def say_too_early(number: int, _: object = None) -> None:
    """Print that a signal came while there were no ranks to send it on to; it may be a handler."""
    name = signal.Signals(number).name
    say(f"{name} came before the ranks had started, and is not sent on to them")


def shell_code(code: int) -> int:
    """Return the exit code of a process as a shell gives it: 128+n for signal n, which is -n."""
    return code if code >= 0 else 128 - code
