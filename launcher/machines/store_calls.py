"""Calls that wait for another machine in C code, where a signal's handler could not run.

A thread makes the call; the main thread, which runs the handlers, waits for the thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from torch.distributed import Store

P = ParamSpec("P")
T = TypeVar("T")

_CHECK_EVERY_S = 0.1  # a signal just before a wait does not end it


def interruptible(do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `do` returns; an exception of a signal's handler ends the wait."""
    return result_of(begin(do, *args, **kwargs))


class AnsweringStore:
    """A store that answers in time or raises; a signal's exception ends each call too.

    torch's own agent uses it as it would the store. Each call is made in another thread, and may
    take `within_s` seconds beyond what it waits for itself; `lost` makes the error after that.
    """

    def __init__(
        self, store: Store, within_s: float, lost: Callable[[Exception], Exception]
    ) -> None:
        self._store = store
        self._within_s = within_s
        self._lost = lost
        self.while_waiting: Callable[[], None] = lambda: None
        """Called while an answer is waited for; what it raises ends the wait."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        return partial(self._call, value) if callable(value) else value

    def _call(self, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        until = time.monotonic() + self._within_s

        def look() -> None:
            self.while_waiting()
            if time.monotonic() > until:
                raise self._lost(TimeoutError(f"no answer within {self._within_s:.0f} s"))

        return result_of(begin(do, *args, **kwargs), look)


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


def result_of(called: futures.Future[T], look: Callable[[], None] = lambda: None) -> T:
    """Return the result of a call that has begun; a signal's exception, or `look`'s, ends this."""
    while not is_done(called, _CHECK_EVERY_S):
        look()
    return called.result()


def is_done(called: futures.Future[T], within_s: float) -> bool:
    """Wait at most `within_s` seconds for the call; return whether it has ended."""
    return bool(futures.wait([called], within_s).done)
