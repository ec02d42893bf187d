"""Calls that wait for another machine in C code, where a signal's handler could not run.

A thread makes the call; the main thread, which runs the handlers, waits for the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_CHECK_EVERY_S = 0.1  # a signal just before a wait does not end it


def interruptible(do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `do` returns; an exception of a signal's handler ends the wait."""
    return result_of(begin(do, *args, **kwargs))


def begin(do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> futures.Future[T]:
    """Call `do` in a thread of its own, which does not keep the process from ending."""
    called: futures.Future[T] = futures.Future()

    def call() -> None:
        try:
            called.set_result(do(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  the caller gets it
            called.set_exception(error)

    threading.Thread(target=call, name="headway-store", daemon=True).start()
    return called


def result_of(called: futures.Future[T]) -> T:
    """Return the result of a call that has begun; a signal's exception ends the wait."""
    while not is_done(called, _CHECK_EVERY_S):
        pass
    return called.result()


def is_done(called: futures.Future[T], within_s: float) -> bool:
    """Wait at most `within_s` seconds for the call; return whether it has ended."""
    return bool(futures.wait([called], within_s).done)
