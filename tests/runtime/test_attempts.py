"""What attempts of all ranks do in one process; with ranks in tests/distributed."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch.distributed import HashStore

from headway import attempts


def test_looking_for_connections_leaves_no_descriptors_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "default_store", HashStore)
    with (
        (tmp_path / "file").open("w"),
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        before = sorted(os.listdir("/dev/fd"))
        found = [(local, remote) for _, local, remote in attempts._connections()]
        assert sorted(os.listdir("/dev/fd")) == before
        ends = connection.getsockname(), server.getsockname()
        assert tuple(f"{host}:{port}" for host, port in ends) in found
