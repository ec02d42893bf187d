"""Machine 0 is found at the address that SLURM knows, and says if its own is that of no device."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from headway.launcher.clusters.slurm import address_of_node
from headway.launcher.machines import connect as connecting
from headway.launcher.machines.connect import connect, listen_as_machine_0

SCONTROL = """#!/bin/sh
[ "$*" = "--oneliner show node n1" ] || exit 1
echo "NodeName=n1 Arch=x86_64 CoresPerSocket=1 NodeAddr=127.0.0.1 NodeHostName=vm Version=22.05.8"
"""


@pytest.mark.processes
def test_a_node_is_reached_at_the_address_that_slurm_has_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert address_of_node("n2") is None

    def no_such_name(place: tuple[str, int], timeout: float) -> socket.socket:
        if place[0] == "n1":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return usual(place, timeout)

    usual = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", no_such_name)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with connect("n1", port, "machine 1", 60, address_of_node) as link:
            assert link.getpeername() == ("127.0.0.1", port)


@pytest.mark.processes
def test_a_missing_scontrol_says_nothing_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert address_of_node("n1") is None


def test_a_main_address_that_is_none_of_machine_0_is_noted_since_machines_may_be_mixed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(connecting, "say", lines.append)
    with listen_as_machine_0("192.0.2.1", 0) as listener:  # of no machine: RFC 5737
        assert listener.getsockname()[1]
    (line,) = lines
    assert "192.0.2.1" in line
