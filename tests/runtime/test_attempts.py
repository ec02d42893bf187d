"""What attempts of all ranks do in one process; with ranks in tests/distributed."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from threading import Thread

import pytest

pytest.importorskip("torch")

from torch.distributed import HashStore

from headway.memory import oom as attempts


def test_the_rank_that_may_have_the_store_leaves_it_last(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(attempts, "default_store", lambda: store)
    ranks = []
    for rank in range(3):
        monkeypatch.setattr(attempts, "rank_and_size", lambda rank=rank: (rank, 3))
        ranks.append(attempts._Attempt("attempt"))
    assert ranks[2].end(attempts.FAILED) == [attempts.FAILED]  # it does not look at the others
    first = Thread(target=ranks[0].end, args=[attempts.DONE])
    first.start()
    tell, told = ranks[1].let_others_read, []

    def tell_late(outcomes: list[str]) -> None:
        first.join(0.5)
        told.append(first.is_alive())
        tell(outcomes)

    monkeypatch.setattr(ranks[1], "let_others_read", tell_late)
    outcomes = ranks[1].end(attempts.DONE)
    first.join()
    assert (outcomes, told) == ([attempts.DONE, attempts.DONE, attempts.FAILED], [True])
    ranks[2].watcher.join()


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
