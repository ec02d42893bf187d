"""A machine 0 that does not answer holds nobody up: Ctrl-C ends a run that waits for it."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.distributed.launching import (
    finished,
    free_port,
    on_linux,
    script,
    start,
    wait_for_end,
    wait_for_pids,
)
from tests.waiting import wait_for_lines

pytestmark = on_linux

SLEEPS = """
import os, sys, time
open("up_" + os.environ["RANK"], "w").write(str(os.getpid()))
while not os.path.exists("end_" + os.environ["RANK"]):
    time.sleep(0.05)
sys.exit(3 * os.path.exists("fail"))
"""


def machine(rank: int, port: int) -> subprocess.Popen[str]:
    where = ["--main-address", "127.0.0.1", "--main-port", str(port)]
    place = ["--num-machines", "2", "--machine-rank", str(rank)]
    return start("-q", "--cpu", "--grace-period-s", "1", *place, *where, script(SLEEPS))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_a_machine_whose_machine_0_is_another_silent_program(
    number: signal.Signals,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, nobody answers
        process = machine(1, silent.getsockname()[1])
        wait_for_lines(process, "something listens there, but has not answered yet")
        process.send_signal(number)
        process.communicate(timeout=120)
    assert process.returncode == 128 + number


@contextmanager
def two_machines_of_which_0_is_suspended() -> Iterator[subprocess.Popen[str]]:
    port = free_port()
    machines = [machine(rank, port) for rank in range(2)]
    wait_for_pids("up_?", 2)
    machines[0].send_signal(signal.SIGSTOP)
    yield machines[1]
    machines[0].send_signal(signal.SIGCONT)
    machines[0].terminate()
    machines[0].communicate(timeout=120)


def test_a_stop_signal_ends_a_machine_whose_machine_0_is_suspended() -> None:
    with two_machines_of_which_0_is_suspended() as other:
        other.send_signal(signal.SIGINT)
        finished(other, 130)


def test_a_rank_that_fails_is_reported_while_machine_0_is_suspended() -> None:
    with two_machines_of_which_0_is_suspended() as other:
        Path("fail").touch()
        Path("end_1").touch()
        _, errors = finished(other, 3)
        assert "rank 1 of 2 ended with exit code 3" in errors


def test_a_stop_signal_ends_a_machine_that_waits_for_a_suspended_machine_0_to_finish() -> None:
    with two_machines_of_which_0_is_suspended() as other:
        Path("end_1").touch()
        rank = int(Path("up_1").read_text())
        wait_for_end(rank)
        other.send_signal(signal.SIGTERM)
        finished(other, 0)
