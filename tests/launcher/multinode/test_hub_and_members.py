"""The channel over real sockets: strangers change nothing, and who falls silent is lost in time."""

from __future__ import annotations

import errno
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from headway.launcher.multinode.connection import closed
from headway.launcher.multinode.coordinator import Coordinator
from headway.launcher.multinode.hub import Hub
from headway.launcher.multinode.hub_client import HubClient
from headway.launcher.multinode.messages import (
    Done,
    Failed,
    HeartbeatLost,
    Join,
    Leave,
    MachineFacts,
    MachineHeartbeat,
    MachineReady,
    Message,
    Probed,
    Session,
    new_greeting,
    read_greeting,
)
from tests.waiting import wait_until

KEY = b"0123456789abcdef"


def open_hub(
    listener: socket.socket,
    machines: int = 2,
    key: bytes = b"",
    timeout_s: float = 60.0,
    log: Callable[[str], None] = lambda _: None,
) -> tuple[Hub, Coordinator]:
    """Have a hub of a run that needs all of its machines and never restarts."""
    coordinator = Coordinator(
        least=machines,
        most=machines,
        max_restarts=0,
        join_timeout_s=600,
        machine_timeout_s=timeout_s,
        facts=MachineFacts({}, {}),
        log=log,
        now=time.monotonic(),
    )
    return Hub(listener, key, coordinator, timeout_s, log), coordinator


class Channel:
    """A hub on the loopback device, and its members."""

    def __init__(self, machines: int) -> None:
        self.lines: list[str] = []
        self.timeout_s = 60.0
        self.machines = machines
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.hub, self.coordinator = open_hub(
            listener, machines, KEY, self.timeout_s, self.lines.append
        )
        self.members: list[HubClient] = []

    def join(self, machine: int, key: bytes = KEY, link: socket.socket | None = None) -> HubClient:
        if link is None:
            own = machine == 0
            link = self.hub.own_end if own else socket.create_connection(self.address)
        member = HubClient(link, key, self.timeout_s)
        self.members.append(member)
        member.send(
            Join(machine, self.machines, self.machines, f"n{machine}", MachineFacts({}, {}))
        )
        member.send(MachineReady(1, 29501 if machine == 0 else None, 1))
        return member


@contextmanager
def channel(machines: int = 2) -> Iterator[Channel]:
    opened = Channel(machines)
    try:
        yield opened
    finally:
        for member in opened.members:
            member.send(Leave())
            member.close()
        opened.hub.close(0.5)


def begin(some: Channel) -> list[HubClient]:
    """Have all machines join, and their ranks start."""
    members = [some.join(machine) for machine in range(some.machines)]
    start_ranks(members)
    return members


def start_ranks(members: list[HubClient]) -> None:
    wait_until(lambda: all(member.probe for member in members))
    for member in members:
        member.send(Probed(""))
    wait_until(lambda: all(member.round for member in members))


def test_a_machine_without_the_key_is_refused_and_named_and_the_run_goes_on() -> None:
    with channel() as some:
        members = begin(some)
        other = some.join(1, key=b"another run's key")
        keyless = some.join(1, key=b"")
        wait_until(lambda: other.peer_error and keyless.peer_error)
        for peer in (other, keyless):
            assert peer.peer_error is not None
            assert peer.peer_error.reason == "key"
        wait_until(lambda: len(some.lines) >= 2)
        assert all("refused a connection from 127.0.0.1" in line for line in some.lines)
        assert not any(member.is_over for member in members)


def greeted(link: socket.socket, key: bytes) -> Session:
    """Greet as a member does; return what seals its messages."""
    ours = new_greeting(key)
    link.sendall(ours.line())
    file = link.makefile("rb")
    theirs = read_greeting(file.readline().rstrip(b"\n"))
    file.close()
    return Session(key, ours, theirs, is_hub=False)


def failure() -> Failed:
    return Failed(0, "stranger", "ended by a stranger", "", "", "", 1, is_final=True)


def attacks(some: Channel) -> Iterator[bytes]:
    """Yield what strangers send after the greeting; each goes to a connection of its own."""
    yield b"GET / HTTP/1.1\r\n\r\n"
    yield b"\x80\x04\x95" + bytes(200)  # a pickle
    yield b"x" * 300_000
    yield b'["Failed",0,"h","c","w","d","f",1,0,0.0,true]\n'
    yield b"0" * 22 + b'["Failed",0,"h","c","w","d","f",1,0,0.0,true]\n'
    with socket.create_connection(some.address) as other:  # recorded on another connection
        session = greeted(other, KEY)
        yield session.seal(Join(1, 2, 2, "n1", MachineFacts({}, {}))) + session.seal(failure())


def test_nothing_that_one_without_the_key_sends_changes_the_run() -> None:
    with channel() as some, socket.create_connection(some.address):  # the second stays silent
        members = begin(some)
        sent = 0
        for data in [b"", *attacks(some)]:
            for greets in (False, True):
                with socket.create_connection(some.address) as stranger, suppress(OSError):
                    if greets:
                        stranger.sendall(new_greeting(KEY).line())
                    stranger.sendall(data)
                    sent += 1
        assert sent == 14
        for member in members:
            member.send(MachineHeartbeat())
            member.send(Done())
        wait_until(lambda: all(member.is_all_done for member in members))
        assert not any(member.ended_by or member.lost for member in members)
        assert not any("stranger" in line for line in some.lines)


def test_one_with_the_key_who_has_not_joined_cannot_end_a_run_that_has_begun() -> None:
    with channel() as some:
        members = begin(some)
        messages: list[Message] = [failure(), Done(), HeartbeatLost("10:15:00")]
        for number, message in enumerate(messages, 1):
            with socket.create_connection(some.address) as early:
                early.sendall(greeted(early, KEY).seal(message))
                wait_until(lambda number=number: len(some.lines) == number)  # type: ignore[misc]
        assert all("has not joined" in line for line in some.lines)
        assert not any(member.is_over for member in members)


@pytest.mark.parametrize(
    "said",
    [b"", new_greeting(KEY).line(), b"220 another program"],
    ids=["nothing", "a greeting", "another program"],
)
def test_an_end_that_closes_unanswered_is_told_from_one_that_speaks_something_else(
    said: bytes,
) -> None:
    here, there = socket.socketpair()
    member = HubClient(here, KEY, 60)
    there.sendall(said)
    there.close()
    wait_until(lambda: member.is_over)
    assert (member.peer_error is not None) == said.startswith(b"220")
    assert member.is_closed_unanswered == (member.peer_error is None)
    member.close()


def test_a_refused_machine_leaves_without_another_line_on_machine_0() -> None:
    with channel() as some:
        main = some.join(0)
        wait_until(lambda: main.accepted)
        link = socket.create_connection(some.address)
        other = HubClient(link, KEY, some.timeout_s)
        other.send(Join(1, 3, 3, "n1", MachineFacts({}, {})))
        wait_until(lambda: other.refused)
        other.send(Leave())
        other.close()
        wait_until(lambda: len(some.hub.peers) == 1)
        (line,) = some.lines
        assert "refused machine 1 (n1, 127.0.0.1)" in line


def test_a_machine_whose_launcher_is_killed_is_known_as_lost_to_all() -> None:
    with channel(3) as some:
        members = begin(some)
        members[2].connection.link.shutdown(socket.SHUT_RDWR)  # as the kernel does
        wait_until(lambda: members[0].ended_by and members[1].ended_by)
        for member in members[:2]:
            assert member.ended_by is not None
            assert "machine 2 (n2) was lost: its launcher exited" in member.ended_by.cause


class Relay:
    """Passes bytes between a member and the hub, in the directions that are open."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.end, inner = socket.socketpair()
        outer = socket.create_connection(address)
        self.passes = {inner: True, outer: True}
        other = {inner: outer, outer: inner}
        selector = selectors.DefaultSelector()
        for one in other:
            selector.register(one, selectors.EVENT_READ)

        def run() -> None:
            with suppress(OSError), inner, outer, selector:
                while True:
                    for key, _ in selector.select():
                        one = key.fileobj
                        assert isinstance(one, socket.socket)
                        data = one.recv(65536)
                        if not data:
                            return
                        if self.passes[one]:
                            other[one].sendall(data)

        self.to_hub, self.from_hub = inner, outer
        self.thread = threading.Thread(target=run)
        self.thread.start()


@contextmanager
def cut_off(machines: int, *, from_hub: bool) -> Iterator[list[HubClient]]:
    """Have a run in which the link of the last machine is cut, in one direction alone.

    The end that hears nothing notices it first: the channel's own timeout is 60 s.
    """
    with ExitStack() as stack:
        some = stack.enter_context(channel(machines))
        relay = Relay(some.address)
        stack.callback(relay.thread.join)
        members = [some.join(machine) for machine in range(machines - 1)]
        members.append(some.join(machines - 1, link=relay.end))
        start_ranks(members)
        relay.passes[relay.from_hub if from_hub else relay.to_hub] = False
        if from_hub:
            members[-1].timeout_s = 0.2
            members[-1].send(MachineHeartbeat())
        else:
            some.hub.peers[machines].received_at -= 2 * some.timeout_s
        yield members
        members[-1].close()


@pytest.mark.parametrize("machines", [2, 3])
def test_a_machine_that_hears_nothing_says_so_and_the_others_blame_the_link(machines: int) -> None:
    with cut_off(machines, from_hub=True) as members:
        *others, last = members
        wait_until(lambda: all(other.ended_by for other in others))
        for other in others:
            assert other.ended_by is not None
            assert other.ended_by.exit_code == 4
            assert f"machine {machines - 1} (n{machines - 1}) was lost" in other.ended_by.cause
            assert re.search(r"nothing from machine 0 since \d\d:\d\d:\d\d", other.ended_by.cause)
        assert last.lost is not None
        assert "it sent nothing" in last.lost


def test_a_machine_that_machine_0_has_not_heard_is_told_so() -> None:
    with cut_off(2, from_hub=False) as (main, other):

        def is_known() -> object:
            main.send(MachineHeartbeat())  # wakes the hub
            return main.ended_by and other.lost

        wait_until(is_known)
        assert main.ended_by is not None
        assert other.lost is not None
        assert "machine 1 (n1) was lost: it sent nothing" in main.ended_by.cause
        assert re.search(r"nothing from this machine since \d\d:\d\d:\d\d", other.lost)


def test_a_connection_that_the_system_gives_up_is_no_end_of_a_launcher() -> None:
    assert closed(EOFError()) == closed(ConnectionResetError()) == "its launcher exited"
    assert "No route to host" in closed(OSError(errno.EHOSTUNREACH, "No route to host"))


def test_a_machine_that_comes_after_machine_0_has_failed_hears_the_cause() -> None:
    with channel(2) as some:
        main = some.join(0)
        wait_until(lambda: main.accepted)
        main.send(failure())
        wait_until(lambda: main.ended_by)
        main.send(Leave())
        main.close()
        ending = threading.Thread(target=some.hub.close, args=(60.0,))
        ending.start()
        late = HubClient(socket.create_connection(some.address), KEY, some.timeout_s)
        late.send(Join(1, 2, 2, "n1", MachineFacts({}, {})))
        wait_until(lambda: late.is_over)
        assert late.ended_by is not None
        assert late.ended_by.cause == failure().cause
        ending.join(30)
        assert not ending.is_alive()
        late.close()
