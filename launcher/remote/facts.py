"""What must be the same on all hosts of a launch over ssh, read on one of them, and compared."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from headway._version import __version__
from headway.errors import HeadwayError, Problem
from headway.launcher.remote.environment import environment_there
from headway.launcher.remote.orders import Facts, Order
from headway.settings.layers import profile_layers

_CONNECTION = "SSH_CONNECTION"  # sshd(8): address and port of the client, then of the server
_DISCARD_PORT = 9  # nothing is sent there


def facts_here(order: Order, environ: Mapping[str, str]) -> Facts:
    """Return the facts of this host, in the working directory of the order.

    Args:
        order: of the launch.
        environ: of this process, in which sshd says how it was reached.
    """
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    facts = Facts(__version__, platform.python_version(), torch, "", {})
    try:
        os.chdir(order.folder)
        facts = facts._replace(
            script=_digest_of_file(order.script), profile=_profile(order, environ)
        )
    except OSError as error:
        return facts._replace(fault=f"{error.filename or order.folder}: {error.strerror}")
    except HeadwayError as error:
        return facts._replace(fault=error.problems[0].without_fix)
    address = (environ.get(_CONNECTION, "").split() or [""] * 3)[2]
    return facts._replace(address=address, port=_free_port())


def differences(host: str, here: Facts, there: Facts) -> Iterator[Problem]:
    """Yield what differs between this host and another one, of what has to be the same."""
    where = f"host {host}"
    if there.fault:
        fix = "make the same folder and files available there, at the same paths"
        yield Problem(f"nothing can be launched on {host}: {there.fault}", where, fix)
        return
    for name, package in (("headway", "Headway"), ("python", "Python"), ("torch", "torch")):
        ours, theirs = getattr(here, name), getattr(there, name)
        if ours != theirs:
            what = f"{package} is {theirs} on {host}, and {ours} here"
            yield Problem(what, where, "install the same version on all hosts")
    if here.script != there.script:
        what = f"the script on {host} is another than the one here"
        yield Problem(what, where, "copy the script there, or keep it on a shared file system")
    names = sorted({*here.profile, *there.profile})
    other = [name for name in names if here.profile.get(name) != there.profile.get(name)]
    if other:
        what = f"the profile on {host} has another {', '.join(other)} than the one here"
        yield Problem(what, where, "copy the profile there, or set this by flags")


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


def _digest_of_file(path: str | None) -> str:
    if path is None or os.path.isdir(path):
        return ""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def _profile(order: Order, environ: Mapping[str, str]) -> dict[str, str]:
    """Return a digest for each setting of the profiles: their values may be secrets."""
    there = environment_there(environ, order.variables)
    layers = profile_layers(there, profile=order.profile)
    values = {name: repr(entry.raw) for layer in layers for name, entry in layer.items()}
    return {name: hashlib.sha256(value.encode()).hexdigest() for name, value in values.items()}


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
        return port
