"""What is read of torch's flight recorders, and where its process groups meet."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from headway.errors import UsageError
from headway.ipc import process_groups
from headway.ipc.records import Collective, Group


def test_a_second_group_under_the_first_ones_name_counts_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = [Collective(number, "all_reduce", "[1]", True, 0.0) for number in (1, 2, 3, 1, 2)]
    monkeypatch.setattr(process_groups, "_flight_records", lambda: [("0", row) for row in made])
    monkeypatch.setattr(process_groups, "_members_by_group", lambda: {"0": (0, 1)})
    assert process_groups.read_groups() == (Group("0", (0, 1), tuple(made[3:])),)


class Store(dict[str, bytes]):
    """As much of a store as is asked for."""

    def check(self, keys: list[str]) -> bool:
        return keys[0] in self

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def met_by(self, rank: int, *launcher_port: str) -> Any:
        """Return torch's module whose ranks meet here, as it is once groups are kept apart."""
        meet: Any = SimpleNamespace(rendezvous=lambda url, *_: iter([(self, rank, 2)]))
        meet._new_process_group_helper = None
        process_groups.prefix_group_stores(meet, *launcher_port)
        return meet


def test_a_second_process_of_a_rank_is_refused_while_the_first_one_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    c10d = (store := Store()).met_by(1)
    for _ in range(2):  # a process may form one group after the other
        assert [*c10d.rendezvous("env://", 1, 2)] == [(store, 1, 2)]
    [(key, own)] = store.items()
    machine = own.decode().rpartition(":")[0]
    store.set(key, f"{machine}:{os.getppid()}")
    with pytest.raises(UsageError, match=f"rank 1 is process {os.getppid()}, .* {os.getpid()} "):
        [*c10d.rendezvous("env://", 1, 2)]
    store.set(key, f"another machine:{os.getppid()}")
    assert [*c10d.rendezvous("env://", 1, 2)] == [(store, 1, 2)]

    def find_none(*_: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", find_none)
    store.set(key, f"{machine}:{os.getppid()}")
    assert [*c10d.rendezvous("env://", 1, 2)] == [(store, 1, 2)]


def test_a_script_that_sets_another_port_than_the_launchers_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", "4000")
    c10d = (store := Store()).met_by(0, "4000")
    assert [*c10d.rendezvous("env://", 0, 2)] == [(store, 0, 2)]
    monkeypatch.setenv("MASTER_PORT", "12355")
    with pytest.raises(UsageError, match="12355") as caught:
        [*c10d.rendezvous("env://", 0, 2)]
    assert "4000" in str(caught.value)
    assert [*c10d.rendezvous("tcp://127.0.0.1:12355", 0, 2)] == [(store, 0, 2)]
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")  # then rank 0 listens there
    assert [*c10d.rendezvous("env://", 0, 2)] == [(store, 0, 2)]
