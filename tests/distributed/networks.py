"""Machines of their own, as network namespaces on this one; root and Linux's `ip` make them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.distributed.launching import HEADWAY, environment, popen

needs_namespaces = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None,
    reason="needs root and ip, to make network namespaces",
)

_ON_MACHINE = """\
import ctypes, os, socket, subprocess, sys
space, name, hosts, *command = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
with open(space) as file:
    entered = libc.setns(file.fileno(), 0)
own = libc.unshare(0x04020000)  # CLONE_NEWUTS | CLONE_NEWNS
private = libc.mount(None, b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
bound = libc.mount(hosts.encode(), b"/etc/hosts", None, 0x1000, None)  # MS_BIND
assert entered == own == private == bound == 0, os.strerror(ctypes.get_errno())
socket.sethostname(name)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
os.execvpe(command[0], command, os.environ)
"""


class Network:
    """Machines n1, n2, ... at 10.79.0.1, ... and fd79::1, fe80::1, ... on one bridge.

    Each knows the others' addresses, and has its own name at 127.0.1.1, as Debian's installer
    writes it.

    Args:
        count: how many machines.
        folder: for their hosts files.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self._prefix = f"hwc{os.getpid() % 100_000}"
        self._folder = folder
        self.numbers = range(1, count + 1)
        self._ip("netns", "add", f"{self._prefix}s")
        self._on_switch("link", "add", "bridge", "type", "bridge")
        self._on_switch("link", "set", "bridge", "up")
        for number in self.numbers:
            self._add(number)

    def _add(self, number: int) -> None:
        space, port = self._space(number), f"port{number}"
        self._ip("netns", "add", space)
        self._on_switch("link", "add", port, "type", "veth", "peer", "name", "eth0")
        self._on_switch("link", "set", "eth0", "netns", space)
        self._on_switch("link", "set", port, "master", "bridge", "up")
        self._ip("-n", space, "addr", "add", f"10.79.0.{number}/24", "dev", "eth0")
        for network in ("fd79", "fe80"):
            address = f"{network}::{number}/64"
            self._ip("-n", space, "-6", "addr", "add", address, "dev", "eth0", "nodad")
        self._ip("-n", space, "link", "set", "eth0", "up")
        known = "".join(f"10.79.0.{other} n{other}\n" for other in self.numbers)
        Path(self._hosts(number)).write_text(f"127.0.0.1 localhost\n127.0.1.1 n{number}\n{known}")

    def launch(self, number: int, *words: str, **variables: str) -> subprocess.Popen[str]:
        """Begin `headway launch` with these words on machine n`number`."""
        return self.start(number, [*HEADWAY, *words], **variables)

    def start(self, number: int, command: list[str], **variables: str) -> subprocess.Popen[str]:
        """Begin a command on machine n`number`."""
        return popen(
            [*self.prefix(number), *command],
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def prefix(self, number: int) -> list[str]:
        """Return the words before a command that runs it on machine n`number`."""
        place = (f"/run/netns/{self._space(number)}", f"n{number}", self._hosts(number))
        return [sys.executable, "-c", _ON_MACHINE, *place]

    def cut(self, number: int) -> None:
        """Cut the cable of a machine."""
        self._on_switch("link", "set", f"port{number}", "down")

    def cut_outgoing(self, number: int, to: int) -> None:
        """Lose what a machine sends to another one, but nothing that the other sends."""
        self._ip("-n", self._space(number), "route", "add", "blackhole", f"10.79.0.{to}")

    def mend(self) -> None:
        """Connect all machines."""
        for number in self.numbers:
            self._on_switch("link", "set", f"port{number}", "up")
            for to in self.numbers:
                with suppress(subprocess.CalledProcessError):
                    self._ip(
                        "-n", self._space(number), "route", "del", "blackhole", f"10.79.0.{to}"
                    )

    def close(self) -> None:
        """Remove the machines and what connects them."""
        for space in [f"{self._prefix}s", *map(self._space, self.numbers)]:
            with suppress(subprocess.CalledProcessError):
                self._ip("netns", "del", space)

    def _hosts(self, number: int) -> str:
        return str(self._folder / f"hosts{number}")

    def _space(self, number: int) -> str:
        return f"{self._prefix}n{number}"

    def _on_switch(self, *words: str) -> None:
        self._ip("-n", f"{self._prefix}s", *words)

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=120)


@contextmanager
def network(count: int, folder: Path) -> Iterator[Network]:
    """Have so many machines for a while."""
    made = Network(count, folder)
    try:
        yield made
    finally:
        made.close()
