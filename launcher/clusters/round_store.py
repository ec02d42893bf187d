"""torch's store of one round of several machines: machine 0 opens it, the others connect to it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, TCPStore

from headway.launcher.clusters.connect import listening_host
from headway.launcher.clusters.interfaces import is_literally_local
from headway.launcher.clusters.listening import listening_socket
from headway.launcher.clusters.rendezvous import no_answer, own_store
from headway.launcher.clusters.store_calls import begin, is_done
from headway.launcher.planning.plan import LOOPBACK

_POLL_INTERVAL_S = 0.1
_STORE_TIMEOUT_S = 60.0


def open_store(main_address: str) -> tuple[TCPStore, int]:
    """Open the store of the next round on machine 0; return it and its port.

    Raises:
        LaunchError: none can be opened.
    """
    host = listening_host(main_address) if is_literally_local(main_address) else ""
    listener = listening_socket(host, 0)
    port: int = listener.getsockname()[1]
    return own_store(host or LOOPBACK, listener), port


def connect_to_store(address: str, port: int, look: Callable[[], None]) -> TCPStore:
    """Connect to the store on machine 0.

    Args:
        address: at which the channel has reached machine 0.
        port: of the store.
        look: called while an answer is waited for, and before an error; what it raises ends this.

    Raises:
        LaunchError: the store does not answer.
    """
    made = begin(
        TCPStore,
        address,
        port,
        is_master=False,
        timeout=timedelta(seconds=_STORE_TIMEOUT_S),
        wait_for_workers=False,
    )
    while not is_done(made, _POLL_INTERVAL_S):
        look()
    try:
        return made.result()
    except DistError as error:
        look()
        raise no_answer(address, port, error) from None
