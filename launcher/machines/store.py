"""torch's store of a round: each call ends in time, and with a signal."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, ParamSpec, TypeVar

from torch.distributed import DistError, Store, TCPStore

from headway.contract.notes import say
from headway.errors import LaunchError
from headway.launcher.machines.connect import (
    begin_call,
    host_port,
    is_done,
    listening_socket,
    result_of,
)
from headway.launcher.plan.variables import LOOPBACK

P = ParamSpec("P")
T = TypeVar("T")

_TIMEOUT = timedelta(seconds=60)
_ANSWER_WITHIN_S = 30.0  # beyond what it waits for on behalf of its caller
_NOTICE_AFTER_S = 1.0


class AnsweringStore:
    """A store that answers in time or raises; a signal's exception, or `look`'s, ends each call.

    torch's own agent uses it as it would the store. Each call is made in another thread.
    """

    def __init__(self, store: Store, address: str, port: int, look: Callable[[], None]) -> None:
        self._store = store
        self._place = address, port
        self._look = look

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        return partial(self._call, value) if callable(value) else value

    def _call(self, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        until = time.monotonic() + _ANSWER_WITHIN_S

        def look() -> None:
            self._look()
            if time.monotonic() > until:
                late = TimeoutError(f"no answer within {_ANSWER_WITHIN_S:.0f} s")
                raise _no_answer(*self._place, late)

        return result_of(begin_call(do, *args, **kwargs), look)


def open_store(host: str) -> tuple[TCPStore, int]:
    """Open a store on an address of this machine, or with no host on all; return it and its port.

    This process is its first client.
    """
    listener = listening_socket(host, 0)
    address, port = host or LOOPBACK, int(listener.getsockname()[1])
    made = begin_call(
        TCPStore,
        address,
        port,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
    )
    if not is_done(made, _NOTICE_AFTER_S):
        say(f"waiting for this machine's own store at {host_port(address, port)}")
    try:
        return result_of(made), port
    except DistError as error:
        raise LaunchError(
            f"the store of this machine does not answer: {host_port(address, port)}",
            where=_said(error),
            fix="check the loopback interface (`ip address show lo`) and the limit of open files "
            "(`ulimit -n`)",
        ) from None


def connect_to_store(address: str, port: int, look: Callable[[], None]) -> TCPStore:
    """Connect to the store on machine 0, at the address by which the channel has reached it.

    `look` is called while an answer is waited for, and before an error; what it raises ends this.
    """
    made = begin_call(
        TCPStore, address, port, is_master=False, timeout=_TIMEOUT, wait_for_workers=False
    )
    try:
        return result_of(made, look)
    except DistError as error:
        look()
        raise _no_answer(address, port, error) from None


def _no_answer(address: str, port: int, error: Exception) -> LaunchError:
    return LaunchError(
        f"torch's store at {host_port(address, port)} does not answer",
        where=_said(error),
        fix="see the output of machine 0; if it is still running, check the network to it",
    )


def _said(error: Exception) -> str:
    return f"torch says: {str(error).splitlines()[0]}"
