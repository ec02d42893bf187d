"""A machine 0 that does not answer holds nobody up: Ctrl-C ends a run that waits for it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.launching import free_port, script, start

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.usefixtures("executed_starts"),
    pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux"),
]

SLEEPS = """
import os, time
open("up_" + os.environ["RANK"], "w").close()
time.sleep(300)
"""


def machine(rank: int, port: int) -> subprocess.Popen[str]:
    where = ["--main-address", "127.0.0.1", "--main-port", str(port)]
    place = ["--num-machines", "2", "--machine-rank", str(rank)]
    return start("-q", "--cpu", "--grace-period-s", "1", *place, *where, script(SLEEPS))


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    """Read stderr until a line contains `text`."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"it ended without {text!r}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_a_machine_whose_machine_0_is_another_silent_program(
    number: signal.Signals,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, nobody answers
        process = machine(1, silent.getsockname()[1])
        wait_for_line(process, "something listens there, but has not answered yet")
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode == 128 + number


def test_a_stop_signal_ends_a_machine_whose_machine_0_is_suspended() -> None:
    port = free_port()
    machines = [machine(rank, port) for rank in range(2)]
    deadline = time.monotonic() + 60
    while len(list(Path.cwd().glob("up_?"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    machines[0].send_signal(signal.SIGSTOP)
    machines[1].send_signal(signal.SIGINT)
    machines[1].communicate(timeout=30)
    assert machines[1].returncode == 130
    machines[0].send_signal(signal.SIGCONT)
    machines[0].communicate(timeout=30)
