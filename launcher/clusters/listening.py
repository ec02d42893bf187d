"""Sockets on which a launcher listens, and what it says if it cannot. No torch."""

from __future__ import annotations

import errno
import socket

from headway.errors import LaunchError

_PORT_ERRORS = {
    errno.EADDRINUSE: (
        "port {port} is in use on this machine",
        "pass another --main-port, the same on every machine",
    ),
    errno.EACCES: (
        "this user may not listen on port {port}",
        "pass a --main-port above 1023, the same on every machine",
    ),
    errno.EMFILE: (
        "the launcher may not open a socket: too many open files",
        "raise the limit of open files: `ulimit -n 4096`",
    ),
}


def listening_socket(host: str, port: int) -> socket.socket:
    """Listen on an address of this machine; with no host on all of them, IPv4 and IPv6.

    Raises:
        LaunchError: the port cannot be had.
        OSError: the address is none of this machine.
    """
    is_dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    if host:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    try:
        return socket.create_server(
            (host, port), family=family, backlog=2048, dualstack_ipv6=is_dual
        )
    except OSError as error:
        if error.errno not in _PORT_ERRORS:
            raise
        what, fix = _PORT_ERRORS[error.errno]
        raise LaunchError(
            what.format(port=port), where=f"main_address {host}, main_port {port}", fix=fix
        ) from None
