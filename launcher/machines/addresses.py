"""This machine's addresses and network interfaces, and sockets on which a launcher listens."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any

from headway.errors import LaunchError


def resolved(host: str) -> list[str]:
    """Return the addresses of a host name.

    Raises:
        OSError: it has none, or none yet.
        UnicodeError: it cannot be a host name.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(place[0]) for *_, place in found))


def plain_address(end: tuple[Any, ...]) -> str:
    """Return the IP address of a socket's end; an IPv4 one as such, on a socket for both, too."""
    return str(end[0]).removeprefix("::ffff:")


def host_port(address: str, port: int) -> str:
    """Return a port of a host, as it is shown: n1:29500, [fd00::1]:29500."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def is_loopback(address: str) -> bool:
    """Return whether an IP address is one that no other machine can reach."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_literally_local(host: str) -> bool:
    """Return whether a host, as it was typed, means this machine alone, whoever says it."""
    try:
        return is_loopback(host)
    except ValueError:  # a name
        return host == "localhost"


def is_here(address: str) -> bool:
    """Return whether an IP address is one of this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this address; None if none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if address in [one.address for one in addresses]:
            return str(name)
    return None


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
