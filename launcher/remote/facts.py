"""What an agent finds on its host before a launch begins: the folder, and the way to others."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

from headway.launcher.remote.orders import Found, Order

_CONNECTION = "SSH_CONNECTION"  # sshd(8): address and port of the client, then of the server
_DISCARD_PORT = 9  # nothing is sent there


def found_here(order: Order, environ: Mapping[str, str]) -> Found:
    """Return what an order finds on this host, and go to its working directory.

    What must be the same on all machines is compared by the launches themselves.

    Args:
        order: of the launch.
        environ: of this process, in which sshd says how it was reached.
    """
    try:
        os.chdir(order.folder)
        if order.script is not None:
            os.stat(order.script)
    except OSError as error:
        return Found(fault=f"{error.filename or order.folder}: {error.strerror}")
    address = (environ.get(_CONNECTION, "").split() or [""] * 3)[2]
    with socket.create_server(("", 0)) as server:
        return Found("", address, server.getsockname()[1])


def address_towards(address: str) -> str:
    """Return the address of this host from which it reaches another one; empty for none."""
    with suppress(OSError):
        family, kind, protocol, _, there = socket.getaddrinfo(
            address, _DISCARD_PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(there)  # of a datagram socket: chooses a route, and sends nothing
            source: str = probe.getsockname()[0]
            return source
    return ""
