"""A machine joins once machine 0 is there, wherever it is and whatever stands before it."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from headway.errors import LaunchError
from headway.launcher.multinode import network
from headway.launcher.multinode.network import listen_as_machine_0
from headway.launcher.plan.program import Program
from tests.distributed.launching import free_port, script
from tests.launcher.multinode.test_hub_and_members import open_hub
from tests.launcher.plan.planning import plan

pytest.importorskip("torch")
from torch.distributed.elastic.multiprocessing.api import SignalException

from headway.launcher.multinode import membership, rendezvous
from headway.launcher.multinode.membership import MultiNodeRendezvous


def machine_1(port: int, join_timeout_s: float, **settings: str) -> MultiNodeRendezvous:
    usual = {"num_machines": "2", "machine_rank": "1", "main_address": "127.0.0.1"}
    flags: dict[str, Any] = {**usual, "main_port": str(port), **settings}
    launch = plan(program=Program(script("pass")), **flags)
    return MultiNodeRendezvous(launch, {}, "run", join_timeout_s)


@contextmanager
def closing(port: int) -> Iterator[None]:
    """Accept each connection and close it, as a tunnel to a port where nothing listens does."""
    listener = socket.create_server(("127.0.0.1", port))

    def close_each() -> None:
        with suppress(OSError):
            while True:
                listener.accept()[0].close()

    thread = threading.Thread(target=close_each)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        listener.close()
        thread.join()


@pytest.mark.slow
def test_what_only_closes_the_connection_is_waited_for_as_what_does_not_listen_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    lines: list[str] = []
    has_said = threading.Event()

    def log(line: str) -> None:
        lines.append(line)
        has_said.set()

    monkeypatch.setattr(membership, "log", log)
    one = machine_1(port, 600)
    joining = threading.Thread(target=one.join)
    with closing(port):
        joining.start()
        assert has_said.wait(60)
    (line,) = lines
    assert f"waiting for machine 0 at 127.0.0.1:{port}" in line
    hub, _ = open_hub(socket.create_server(("127.0.0.1", port)))
    joining.join(60)
    assert not joining.is_alive()
    assert one.member is not None
    assert one.member.accepted is not None
    one.shutdown()
    hub.own_end.close()
    hub.close(60)


def test_a_machine_without_a_rank_that_has_not_the_main_address_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(membership, "log", lines.append)
    monkeypatch.setattr(network, "NOTICE_AFTER_S", 0.0)
    monkeypatch.setattr(network, "connect_to", lambda *_: socket.create_connection(("::1", 1)))
    with pytest.raises(LaunchError):
        machine_1(1, 0.2, main_address="192.0.2.1", machine_rank="auto").join()
    assert "pass --machine-rank 0" in lines[0]
    lines.clear()
    with pytest.raises(LaunchError):
        machine_1(1, 0.2, main_address="192.0.2.1").join()
    assert "--machine-rank" not in lines[0]


def test_a_machine_without_a_rank_is_machine_0_once_the_main_address_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: Iterator[list[str]] = iter([["127.0.0.1"]])

    def resolved(_: str) -> list[str]:
        if not connections:
            raise socket.gaierror("not yet")
        return next(answers)

    def connect_to(*_: object) -> socket.socket:
        connections.append(1)
        raise socket.gaierror("not yet")

    connections: list[int] = []
    monkeypatch.setattr(network, "resolved", resolved)
    monkeypatch.setattr(network, "connect_to", connect_to)
    monkeypatch.setattr(network, "listening_host", lambda _: "127.0.0.1")
    one = machine_1(free_port(), 600, main_address="train-0.train", machine_rank="auto")
    one.join()
    assert one.hub is not None
    one.shutdown()


def test_a_link_local_address_keeps_its_interface_which_differs_between_machines() -> None:
    index = socket.if_nametoindex("lo")
    assert network.plain_address(("fe80::1", 0, 0, index)) == "fe80::1%lo"
    assert network.plain_address(("::ffff:10.0.0.1", 0, 0, 0)) == "10.0.0.1"
    assert network.reachable_address("fe80::1%lo", "fe80::2%eth1") == "fe80::1%eth1"
    assert network.reachable_address("10.0.0.1", "10.0.0.2") == "10.0.0.1"


def test_what_closes_each_connection_until_the_join_timeout_is_no_machine_0() -> None:
    port = free_port()
    refusal = r"cannot reach machine 0.* closes the connection"
    with closing(port), pytest.raises(LaunchError, match=refusal):
        machine_1(port, 0.0).join()


def test_what_speaks_something_else_is_an_error_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            link, _ = listener.accept()
            link.sendall(b"220 another program")
            link.close()

        speaking = threading.Thread(target=speak)
        speaking.start()
        one = machine_1(listener.getsockname()[1], 600)
        with pytest.raises(LaunchError, match="is not machine 0"):
            one.join()
        one.shutdown()
        speaking.join()


def test_a_main_address_that_is_none_of_machine_0_is_noted_since_machines_may_be_mixed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(network, "log", lines.append)
    with listen_as_machine_0("192.0.2.1", 0) as listener:  # of no machine: RFC 5737
        assert listener.getsockname()[1]
    (line,) = lines
    assert "192.0.2.1" in line


def test_a_stop_signal_just_before_a_delay_is_obeyed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        """Sleep to the end: the signal was there before the system's call, and ends none."""
        nonlocal now
        now += seconds
        raise SignalException("stopped", signal.SIGTERM)  # as its handler does after the call

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(rendezvous, "time", clock)
    with pytest.raises(SignalException):
        rendezvous.Rendezvous("run", 1).pause(60)
    assert now < 1


def test_a_delay_lasts_as_long_as_it_was_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(rendezvous, "time", clock)
    rendezvous.Rendezvous("run", 1).pause(2.5)
    assert sum(slept) == pytest.approx(2.5)
