"""A launch that fails before it joins is known to the machines that would wait for it."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

import pytest

from headway.commands import giving_up as commands_giving_up
from headway.commands.launch import make_parser
from headway.commands.main import main
from headway.errors import ConfigError
from headway.launcher.clusters import giving_up
from headway.launcher.clusters.channel.coordinator import Coordinator
from headway.launcher.clusters.channel.hub import Hub
from headway.launcher.clusters.channel.member import Member
from headway.launcher.clusters.channel.messages import Facts, Join
from tests.distributed.launching import free_port

KEY = "the key of this run"


class Main:
    """Machine 0 of two, which waits for machine 1."""

    def __init__(self, port: int) -> None:
        coordinator = Coordinator(
            least=2,
            most=2,
            max_restarts=0,
            join_timeout_s=600,
            machine_timeout_s=60,
            facts=Facts((), ()),
            say=lambda _: None,
            now=time.monotonic(),
        )
        listener = socket.create_server(("127.0.0.1", port))
        self.hub = Hub(listener, KEY.encode(), coordinator, 60, lambda _: None)
        self.member = Member(self.hub.take_own_end(), KEY.encode(), 60, str)
        self.member.send(Join(0, 2, 2, "n0", 1, time.time()))

    def cause(self) -> str:
        """Return why the run has ended."""
        assert self.member.wait(lambda: self.member.ended_by is not None, 60)
        assert self.member.ended_by is not None
        return self.member.ended_by.cause

    def __enter__(self) -> Main:
        return self

    def __exit__(self, *_: object) -> None:
        self.member.close()
        self.hub.close(0.5)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return a free port, for machine 0 of a run with a key."""
    monkeypatch.setenv("HEADWAY_RUN_KEY", KEY)
    return free_port()


def launch(port: int, *words: str) -> int:
    return main(["launch", "--main-port", str(port), *words])


@pytest.mark.wording
def test_a_wrong_script_or_setting_on_one_machine_ends_the_wait_of_machine_0(port: int) -> None:
    for words, said in (
        (("missing.py",), "cannot take part: script 'missing.py' not found"),
        (("--devices", "7", "--device", "cpu", __file__), "cannot take part: devices is '7'"),
    ):
        with Main(port) as waiting:
            place = ("--num-machines", "2", "--machine-rank", "1", "--main-address", "127.0.0.1")
            code = launch(port, *place, *words)
            assert code == 2
            assert said in waiting.cause()
            assert waiting.member.ended_by is not None
            assert waiting.member.ended_by.exit_code == code


def test_where_a_scheduler_starts_all_at_once_a_machine_0_that_is_slower_is_told_too(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving_up, "_STARTS_WITHIN_S", 600)
    begins = threading.Event()
    monkeypatch.setattr(giving_up, "say", lambda _: begins.set())
    for name, text in {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(f"PET_{name}", text)
    failing = threading.Thread(target=launch, args=(port, "missing.py"))
    failing.start()
    assert begins.wait(60)
    with Main(port) as waiting:
        assert "missing.py" in waiting.cause()
        failing.join()


def give_up_as(rank: int, port: int) -> threading.Thread:
    """Begin what a scheduler's launch does that has failed on one of two machines."""
    environ = {
        "HEADWAY_RUN_KEY": KEY,
        "PET_NNODES": "2",
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "127.0.0.1",
    }
    words = ["--main-port", str(port), "missing.py"]
    error = ConfigError(f"no script on {rank}", where="here", fix="write it")
    giving_up_here = threading.Thread(
        target=commands_giving_up.give_up, args=(words, make_parser(), environ, error)
    )
    giving_up_here.start()
    return giving_up_here


def test_a_machine_0_that_fails_before_it_listens_tells_those_that_a_scheduler_has_started(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving_up, "_STARTS_WITHIN_S", 600)
    failing = give_up_as(0, port)
    link = connected(port)
    other = Member(link, KEY.encode(), 60, str)
    other.send(Join(1, 2, 2, "n1", 1, time.time()))
    assert other.wait(lambda: other.ended_by is not None, 60)
    assert other.ended_by is not None
    assert "machine 0" in other.ended_by.cause
    assert "no script on 0" in other.ended_by.cause
    failing.join()
    other.close()


def test_machines_that_all_fail_alike_do_not_wait_for_each_other(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving_up, "_STARTS_WITHIN_S", 600)
    for failing in [give_up_as(rank, port) for rank in (1, 0)]:
        failing.join(120)
        assert not failing.is_alive()


def connected(port: int) -> socket.socket:
    deadline = time.monotonic() + 60
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port))
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "words",
    [
        ("missing.py",),
        ("--num-machines", "2", "--machine-rank", "0", "--main-address", "a", "missing.py"),
        ("--num-machines", "2:3", "--main-address", "a", "missing.py"),
        ("--num-machines", "2", "--machine-rank", "1", "--main-address", "a", "--dry-run", "x.py"),
    ],
)
def test_nobody_is_told_by_a_launch_that_no_machine_waits_for(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    for name in ("_tell_machine_0", "_tell_others"):
        monkeypatch.setattr(giving_up, name, lambda *args: told.append(args))
    assert main(["launch", *words]) == 2
    assert not told
