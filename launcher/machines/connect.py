"""How a machine listens for the others of a run and reaches them, and what it says if it cannot."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable

from headway.contract.notes import say
from headway.errors import LaunchError
from headway.launcher.machines.addresses import (
    host_port,
    is_here,
    is_literally_local,
    is_loopback,
    listening_socket,
    resolved,
)
from headway.launcher.machines.member import Member
from headway.launcher.machines.messages import Probe
from headway.launcher.machines.run_key import HOW_TO_SET
from headway.launcher.machines.store_calls import interruptible

_CONNECT_TIMEOUT_S = 5.0
_POLL_INTERVAL_S = 0.1
_NOTICE_AFTER_S = 1.0
_OTHER_FILES = 512  # open in a launcher, besides its connections to other machines


def listening_host(address: str) -> str:
    """Return the main address if other machines reach this one by it, else all addresses."""
    if is_literally_local(address):
        return address
    try:
        addresses = resolved(address)
    except (OSError, UnicodeError):  # it has no name yet, as in a new pod
        return ""
    if any(map(is_loopback, addresses)):
        say(
            f"note: main_address {address} is {addresses[0]} on this machine, which no "
            "other reaches; listening on all of its addresses"
        )
        return ""
    return address


def is_machine_0(rank: int | None, address: str) -> bool:
    """Return whether to listen: without ranks given, who is at the main address does."""
    if rank is not None:
        return rank == 0
    try:
        return any(is_here(one) for one in resolved(address))
    except (OSError, UnicodeError):
        return False


def listen_as_machine_0(address: str, port: int) -> socket.socket:
    """Listen for the other machines.

    Raises:
        LaunchError: the port cannot be had.
    """
    try:
        return listening_socket(listening_host(address), port)
    except OSError:  # the address is that of a router to this machine, say
        say(f"note: main_address {address} is none of this machine's; listening on all of its own")
        return listening_socket("", port)


def connect(
    address: str, port: int, this: str, within_s: float, look_up: Callable[[str], str | None]
) -> socket.socket:
    """Return a connection to machine 0, once its name resolves and something listens there.

    Args:
        address: of machine 0.
        port: on it.
        this: this machine, for messages.
        within_s: how long to wait.
        look_up: returns another address of machine 0, or None; asked once, for an unknown name.

    Raises:
        LaunchError: nothing does within the join timeout.
    """
    until = time.monotonic() + within_s
    notice_at = time.monotonic() + _NOTICE_AFTER_S
    host: str | None = None
    while True:
        try:
            place = (host or address, port)
            return interruptible(socket.create_connection, place, _CONNECT_TIMEOUT_S)
        except UnicodeError as error:
            raise cannot_reach(address, port, this, f"it is no host name: {error}") from None
        except OSError as error:
            reason = error.strerror or str(error)
            if isinstance(error, socket.gaierror) and host is None:
                host = look_up(address) or address
        if time.monotonic() > until:
            raise cannot_reach(address, port, this, reason)
        if time.monotonic() > notice_at:
            say(f"waiting for machine 0 at {host_port(address, port)} ({reason})")
            notice_at = until
        time.sleep(_POLL_INTERVAL_S)


def cannot_reach(address: str, port: int, this: str, reason: str) -> LaunchError:
    """Return the error for a machine 0 that is not there within the join timeout."""
    return LaunchError(
        f"{this} cannot reach machine 0 at {host_port(address, port)}: {reason}",
        where=f"main_address {address}, main_port {port}",
        fix="start the run on machine 0, and open that port in its firewall; --main-address is "
        "a name or IP address of machine 0 that all machines know",
    )


def not_taken_in(
    member: Member, address: str, port: int, this: str, key_origin: str
) -> LaunchError:
    """Return the error for a machine that machine 0 has not taken in.

    Args:
        member: its end of the connection.
        address: of machine 0.
        port: of machine 0.
        this: the machine, for messages.
        key_origin: where its key comes from.
    """
    if member.refused is not None:
        refused = member.refused
        return LaunchError(refused.what, where=refused.where, fix=refused.fix)
    unacceptable = member.unacceptable
    if unacceptable is None or not unacceptable.reason:
        return not_machine_0(address, port, str(unacceptable or "has closed the connection"))
    if unacceptable.reason == "version":
        return LaunchError(
            f"machine 0 at {host_port(address, port)} runs another version of Headway",
            where=this,
            fix="install the same version on every machine",
        )
    return LaunchError(
        f"machine 0 at {host_port(address, port)} does not know the key of {this}",
        where=f"the run's key here: {key_origin}",
        fix=f"another run may listen there: pass another --main-port; or {HOW_TO_SET}",
    )


def not_machine_0(address: str, port: int, what: str) -> LaunchError:
    """Return the error for something else that listens where machine 0 should."""
    return LaunchError(
        f"what listens at {host_port(address, port)} is not machine 0 of a run: {what}",
        where=f"main_address {address}, main_port {port}",
        fix="start the run on machine 0, or, if another program uses that port there, pass "
        "another --main-port on every machine",
    )


def try_to_reach(probe: Probe) -> str:
    """Connect to another machine; return what is wrong, or empty."""
    try:
        interruptible(
            socket.create_connection, (probe.address, probe.port), _CONNECT_TIMEOUT_S
        ).close()
    except OSError as error:
        reason = error.strerror or str(error)
        return f"cannot reach {probe.label} at {probe.address}: {reason}"
    return ""


def allow_open_files(num_machines: int) -> None:
    """Raise this process's limit of open files as far as a run with many machines needs it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_machines + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
