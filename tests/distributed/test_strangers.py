"""What a program without the run's key sends to machine 0 changes nothing, while a run goes on."""

from __future__ import annotations

import random
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from headway.launcher.machines.messages import (
    MAX_LINE,
    Done,
    Facts,
    Failed,
    Join,
    Leave,
    Message,
    Ready,
    Session,
    Stopping,
    new_greeting,
    read_greeting,
)
from tests.distributed.launching import script, start
from tests.distributed.test_machines import TRAINS, are_up, ends, on_loopback
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.long,
    pytest.mark.usefixtures("executed_starts"),
    pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux"),
]

TIMES = 100
MESSAGES: list[Message] = [
    Join(1, 2, 2, "stranger", 0.0, Facts((), ())),
    Join(None, 2, 2, "stranger", 0.0, Facts((), ())),
    Ready(4711, 4712),
    Failed(1, "stranger", "ended by a stranger", "", "", "", 1, is_final=True),
    Stopping(15, "stranger", ends_grace=True),
    Done(),
    Leave(),
]


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 60)


def attacks(port: int, dice: random.Random) -> Iterator[None]:
    """Open one connection after the other, and send what one without the key can."""
    for message in MESSAGES:  # as a machine with another key, or with none, would send it
        for key in (b"the key of another run", b""):
            with connected(port) as link, link.makefile("rb") as answers:
                ours = new_greeting(key)
                link.sendall(ours.line())
                session = Session(key, ours, read_greeting(answers.readline()[:-1]), is_hub=False)
                with suppress(ConnectionError):
                    link.sendall(session.seal(MESSAGES[0]) + session.seal(message))
                    answers.read()
            yield
    for data in (
        dice.randbytes(300),
        b"GET / HTTP/1.1\r\n\r\n",
        new_greeting(b"x").line() * 3,
        new_greeting(b"x").line() + b"0" * 22 + b'["Stopping",15,"stranger",true]\n',
        dice.randbytes(MAX_LINE * 2),
    ):
        with connected(port) as link, suppress(ConnectionError):
            link.sendall(data)
        yield


def test_a_stranger_changes_nothing_while_a_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_RUN_KEY", "the key of this run")
    place = on_loopback("2", "--set", "machine_timeout_s=60", "--machine-rank")
    port = int(place[place.index("--main-port") + 1])
    machines = [start(*place, str(rank), script(TRAINS)) for rank in range(2)]
    wait_until(are_up(2), *machines)
    sent, dice, began = 0, random.Random(11), time.monotonic()
    with ExitStack() as silent:
        for _ in range(400):  # more than the hub keeps
            silent.enter_context(connected(port))
        for _ in range(TIMES):
            sent += sum(1 for _ in attacks(port, dice))
        assert [one.poll() for one in machines] == [None, None]
    Path("end_0").touch()
    (code, errors), (other, _) = ends(machines)
    assert (code, other) == (0, 0), errors
    assert 0 < errors.count("refused a connection from 127.0.0.1") <= 10
    print(f"\n{sent} connections of strangers in {time.monotonic() - began:.0f} s")
