"""Network addresses, listening sockets and connections of a launcher."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any

from headway.errors import Code, LaunchError
from headway.ipc.stderr import log
from headway.launcher.multinode.messages import Probe

CHECK_EVERY_S = 0.1
"""The polling interval of waits; a signal that arrives just before a wait does not interrupt it."""

NOTICE_AFTER_S = 1.0
"""Seconds after which a wait is logged; most waits are shorter."""

_CONNECT_TIMEOUT_S = 5.0  # per attempt


def resolved(host: str) -> list[str]:
    """Return a host's addresses; raises OSError or, for an invalid name, UnicodeError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(plain_address(place) for *_, place in found))


def plain_address(end: tuple[Any, ...]) -> str:
    """Return a socket address's IP address; a link-local address includes the interface.

    IPv4-mapped addresses of dual-stack sockets are returned as IPv4 addresses.
    """
    interface = f"%{socket.if_indextoname(end[3])}" if len(end) > 3 and end[3] else ""
    return str(end[0]).removeprefix("::ffff:") + interface


def reachable_address(address: str, own_address: str) -> str:
    """Return another machine's address; append this machine's interface to a link-local address."""
    interface = own_address.partition("%")[2]
    plain, has_interface, _ = address.partition("%")
    return f"{plain}%{interface}" if has_interface and interface else address


def host_port(address: str, port: int) -> str:
    """Format a host and a port, such as n1:29500 or [fd00::1]:29500."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_loopback_host(host: str) -> bool:
    """Return whether a host, such as localhost, always refers to the local machine."""
    try:
        return is_loopback(host)
    except ValueError:  # a name
        return host == "localhost"


def is_local_address(address: str) -> bool:
    try:
        family, end = _socket_address(address, 0)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(end)
    except OSError:
        return False
    return True


def _socket_address(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    """Return the socket family and socket address of a host and port."""
    family, _, _, _, end = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, end


def interface_with(address: str) -> str | None:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if address in [address.address for address in addresses]:
            return str(name)
    return None


_PORT_ERRORS = {
    errno.EADDRINUSE: (
        "port {port} is in use on this machine",
        "pass another --main-port, the same on every machine",
    ),
    errno.EACCES: (
        "this user has no permission to listen on port {port}",
        "pass a --main-port above 1023, the same on every machine",
    ),
    errno.EMFILE: (
        "cannot open a socket: too many open files",
        "raise the limit on open files: `ulimit -n 4096`",
    ),
}


class PortInUse(LaunchError):
    """Another process is using the port."""


def listening_socket(host: str, port: int) -> socket.socket:
    """Listen on an address of this machine; an empty host means all IPv4 and IPv6 addresses.

    Raises LaunchError if the port is unavailable, and OSError if no interface has the address.
    """
    is_dual = not host and socket.has_dualstack_ipv6()
    family: int = socket.AF_INET6 if is_dual else socket.AF_INET
    end: tuple[Any, ...] = (host, port)
    if host:
        family, end = _socket_address(host, port)
    try:
        return socket.create_server(end, family=family, backlog=2048, dualstack_ipv6=is_dual)
    except OSError as error:
        if error.errno not in _PORT_ERRORS:
            raise
        what, fix = _PORT_ERRORS[error.errno]
        kind = PortInUse if error.errno == errno.EADDRINUSE else LaunchError
        where = f"main_address {host}, main_port {port}"
        raise kind(what.format(port=port), where=where, fix=fix, code=Code.PORT) from None


def listening_host(address: str) -> str:
    """Return the host to listen on: the main address, or "" (all addresses) if it is unusable."""
    if is_loopback_host(address):
        return address
    try:
        addresses = resolved(address)
    except (OSError, UnicodeError):  # the name does not resolve yet, as in a new pod
        return ""
    if any(map(is_loopback, addresses)):
        log(
            f"note: on this machine, main_address {address} resolves to {addresses[0]}, which no "
            "other machine can reach; listening on all addresses"
        )
        return ""
    return address


def is_machine_0(rank: int | None, address: str) -> bool:
    """Return whether this is machine 0, according to its rank or, without one, the main address."""
    if rank is not None:
        return rank == 0
    try:
        return any(is_local_address(ip) for ip in resolved(address))
    except (OSError, UnicodeError):
        return False


def listen_as_machine_0(address: str, port: int) -> socket.socket:
    """Listen for the other machines; raises LaunchError if the port is unavailable."""
    try:
        return listening_socket(listening_host(address), port)
    except OSError:  # for example a router's address
        log(
            f"note: main_address {address} is not on this machine; listening on all addresses;"
            " if this is not machine 0, pass another --machine-rank"
        )
        return listening_socket("", port)


def connect_to(address: str, port: int) -> socket.socket:
    return socket.create_connection((address, port), _CONNECT_TIMEOUT_S)


def probe_machine(probe: Probe) -> str:
    """Connect to another machine; return the error, or an empty string."""
    try:
        connect_to(probe.address, probe.port).close()
    except OSError as error:
        reason = error.strerror or str(error)
        return f"cannot reach {probe.label} at {probe.address}: {reason}"
    return ""
