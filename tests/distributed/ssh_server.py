"""An ssh server of our own, on two addresses of this machine, that stand for two hosts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.distributed.launching import free_port
from tests.waiting import wait_until

_HOSTS = {"a": "127.0.0.1", "b": "127.0.0.2"}
_PRIVILEGES = Path("/run/sshd")  # sshd wants it where root starts it

_SERVER = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile {folder}/sshd-{name}.pid
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
"""
_CLIENT = """\
Host *
  Port {port}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
"""


def why_no_server() -> str:
    """Return why no server can be started here; empty if one can."""
    if sys.platform != "linux":
        return "other systems have no second loopback address"
    if _sshd() is None or shutil.which("ssh-keygen") is None:
        return "OpenSSH's server is not installed"
    with suppress(OSError):
        if os.geteuid() == 0:
            _PRIVILEGES.mkdir(mode=0o755, exist_ok=True)
        return ""
    return f"{_PRIVILEGES} cannot be made"


def _sshd() -> str | None:
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@contextmanager
def ssh_server(folder: Path) -> Iterator[psutil.Process]:
    """Run a server in which hosts a and b are known to the `ssh` in folder/bin."""
    port = free_port()
    prepare(folder, _HOSTS, port)
    with serve(folder, _HOSTS.values(), port) as server:
        yield server


def prepare(folder: Path, hosts: Mapping[str, str], port: int) -> None:
    """Write keys, and a folder/bin/ssh that knows hosts by these names, at their addresses."""
    for name in ("host_key", "key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
        )
    names = [f"Host {name}\n  HostName {address}\n" for name, address in hosts.items()]
    (folder / "config").write_text("".join(names) + _CLIENT.format(folder=folder, port=port))
    key = (folder / "host_key.pub").read_text()
    known = [f"[{address}]:{port} {key}" for address in hosts.values()]
    (folder / "known_hosts").write_text("".join(known))
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    ssh.chmod(0o755)


@contextmanager
def serve(
    folder: Path, addresses: Collection[str], port: int, prefix: Sequence[str] = ()
) -> Iterator[psutil.Process]:
    """Run a server at these addresses, with the keys of `prepare`.

    Args:
        folder: that of `prepare`.
        addresses: of the machine that it runs on.
        port: the same on all.
        prefix: the words before a command that runs it on another machine.
    """
    sshd = _sshd()
    assert sshd is not None
    name = "-".join(addresses)
    config, log = folder / f"sshd_config-{name}", folder / f"sshd-{name}.log"
    listening = [f"ListenAddress {address}:{port}\n" for address in addresses]
    config.write_text("".join(listening) + _SERVER.format(folder=folder, name=name))
    command = [*prefix, sshd, "-D", "-f", str(config), "-E", str(log)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as server:
        try:
            wait_until(lambda: server.poll() is not None or _listens(log, len(addresses)))
            if server.poll() is not None:
                pytest.skip(f"sshd does not start here: {log.read_text()}")
            yield psutil.Process(server.pid)
        finally:
            server.send_signal(signal.SIGTERM)


def _listens(log: Path, count: int) -> bool:
    return log.exists() and log.read_text().count("Server listening") == count
