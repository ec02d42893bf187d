"""A stdout or stderr that is not read, closed, full or odd neither holds a run up nor hides it."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.distributed.launching import script, start

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="asks a pipe for what is in it"),
]

UNREAD = """
import os, signal, sys, time
def save(number, frame):
    print("y" * 2**21)  # more than pipes and the launcher hold
    open("saved", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
open("ready_" + os.environ["RANK"], "w").close()
if os.environ["RANK"] == "1":
    while not os.path.exists("fail"):
        time.sleep(0.01)
    sys.exit(7)
while True:
    os.write(1, b"x" * 99 + b"\\n")
"""


@contextmanager
def unread(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Begin a launch whose stdout is a pipe that nobody reads, and wait until it is full."""
    with start("-q", "--cpu", "--num-processes", "2", *words) as process:
        assert process.stdout is not None
        capacity = fcntl.fcntl(process.stdout, fcntl.F_GETPIPE_SZ)
        num_unread = 0
        while num_unread < capacity - 4096 or len(list(Path.cwd().glob("ready_?"))) < 2:
            assert process.poll() is None
            answer = fcntl.ioctl(process.stdout, termios.FIONREAD, b"\0" * 4)
            num_unread = int.from_bytes(answer, sys.byteorder)
            time.sleep(0.01)
        try:
            yield process
        finally:
            process.kill()


def test_a_failure_is_acted_on_while_stdout_is_not_read() -> None:
    with unread("--log-dir", "logs", script(UNREAD)) as process:
        Path("fail").touch()
        assert process.stderr is not None
        errors = process.stderr.read()  # to its end, while stdout is still not read
        assert process.wait(timeout=60) == 7
    assert "rank 1 of 2 ended with exit code 7" in errors
    assert "stdout was not read" in errors
    assert Path("saved").exists()
    (log,) = Path("logs").glob("*/rank_0_*")
    assert log.read_text().endswith("y" * 2**21 + "\n")


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)],
)
def test_a_stop_signal_is_obeyed_while_stdout_is_not_read(number: int, code: int) -> None:
    with unread(script(UNREAD)) as process:
        process.send_signal(number)
        assert process.stderr is not None
        errors = process.stderr.read()
        assert process.wait(timeout=60) == code, errors
    assert Path("saved").exists()
