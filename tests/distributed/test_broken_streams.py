"""A stdout or stderr that is not read, closed, full or odd neither holds a run up nor hides it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.distributed.launching import HEADWAY, finished, on_linux, run, script, start
from tests.waiting import wait_until

pytestmark = on_linux

WORDS = ["-q", "--cpu", "--num-processes", "2", "--log-dir", "logs"]

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
def unread(name: str) -> Iterator[subprocess.Popen[str]]:
    """Begin a launch whose stdout is a pipe that nobody reads, and wait until it takes no more.

    How many bytes that is depends on how they were written: a page may be full in part.
    """
    with start(*WORDS, name) as process:
        stdout, counts = process.stdout, [0]
        assert stdout is not None

        def is_full() -> bool:
            answer = fcntl.ioctl(stdout, termios.FIONREAD, b"\0" * 4)
            counts.append(int.from_bytes(answer, sys.byteorder))
            return counts[-1] > 0 and len(set(counts[-25:])) == 1 and len(counts) > 25

        wait_until(lambda: len(list(Path.cwd().glob("ready_?"))) == 2, process)
        wait_until(is_full, process)
        try:
            yield process
        finally:
            process.kill()


def test_a_failure_is_acted_on_while_stdout_is_not_read() -> None:
    with unread(script(UNREAD)) as process:
        Path("fail").touch()
        assert process.stderr is not None
        errors = process.stderr.read()  # to its end, while stdout is still not read
        assert process.wait(timeout=120) == 7
    assert "rank 1 of 2 exited with code 7" in errors
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
        assert process.wait(timeout=120) == code, errors
    assert Path("saved").exists()


FAILING = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
print("x" * 10_000)
if os.environ["RANK"] == "1":
    raise ValueError("boom")
dist.barrier()
"""


def launch_in_shell(words: str, name: str) -> subprocess.CompletedProcess[str]:
    """Run `headway launch` on two ranks, amid these words of a shell."""
    return run(["bash", "-c", words.replace("LAUNCH", '"$@"'), "bash", *HEADWAY, *WORDS, name])


PRINTING = """
import os, signal, time
if "BY_SIGNAL" in os.environ:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
while True:
    print("x" * 1000)
    time.sleep(0.01)
"""


@pytest.mark.parametrize(("by_signal", "code"), [(False, 1), (True, 141)])
def test_a_reader_of_stdout_that_goes_away_ends_the_run_with_one_line(
    by_signal: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_signal:
        monkeypatch.setenv("BY_SIGNAL", "1")
    with start(*WORDS, script(PRINTING)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "x" * 1000 in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == "headway: the reader of stdout disconnected\n"
        assert process.wait(timeout=120) == code


EXITING = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("last words")
    sys.exit(7)
time.sleep(300)
"""


def test_the_report_comes_to_stdout_where_stderr_is_closed_and_names_are_not_utf_8() -> None:
    folder = os.fsdecode(b"caf\xe9")
    os.mkdir(folder)
    os.chdir(folder)
    done = launch_in_shell("LAUNCH 2>&-", script(FAILING, folder + ".py"))
    assert (done.returncode, done.stderr) == (1, "")
    assert "error: rank 1 of 2 failed with ValueError" in done.stdout
    assert r"caf\udce9/caf\udce9.py" in done.stdout
    (log,) = Path("logs").glob("*/rank_1_*")
    assert "ValueError: boom" in log.read_text()


def test_the_exit_code_is_the_ranks_and_the_log_is_written_where_both_streams_are_closed() -> None:
    done = launch_in_shell("LAUNCH >&- 2>&-", script(EXITING))
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
    (log,) = Path("logs").glob("*/rank_1_*")
    assert log.read_text() == "last words\n"


REOPENED = """
import sys
from headway.launcher.processes import server
sys.stdout = sys.stderr = None  # they are closed, or a sitecustomize did this
server._reopen_streams()
print("out", file=sys.stdout)
print("error \\udce9", file=sys.stderr)
"""


def test_a_rank_has_its_streams_where_the_fork_server_has_none() -> None:
    done = run([sys.executable, "-c", REOPENED])
    assert (done.stdout, done.stderr) == ("out\n", "error \\udce9\n")


LIMITED = """
import errno, os, sys
fork, count = os.fork, 0
def limited():  # as under `ulimit -u`, which does not bind root
    global count
    count += "processes.server" in str(sys.orig_argv)
    if count > 1:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()
os.fork = limited
"""


THREADLESS = """
import sys, threading
start = threading.Thread.start
def limited(thread):
    if thread.name == "NAME" and "launch" in sys.orig_argv:
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = limited
"""


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (LIMITED, "the ranks cannot be started: Resource temporarily unavailable"),
        *(
            (THREADLESS.replace("NAME", f"headway-{name}"), "ulimit -u")
            for name in ("starter", "output", "watch")
        ),
    ],
    ids=["fork", "starter", "output", "watch"],
)
def test_a_limit_of_processes_or_threads_that_is_reached_is_named_with_the_fix(
    limit: str, said: str
) -> None:
    process = start("-q", "--cpu", "--num-processes", "3", script("pass"), first=limit)
    _, errors = finished(process, 4)
    assert said in errors
    assert "ulimit -u" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("words", [[], ["--supervise"]])
def test_a_full_disk_behind_stderr_does_not_keep_the_script_from_running(words: list[str]) -> None:
    command = [*HEADWAY, "--cpu", *words, script("print('ran'); raise SystemExit(7)")]
    with open("/dev/full", "w") as full:
        done = run(command, stderr=full)
    assert done.returncode == 7
    assert "ran\n" in done.stdout  # and reports, where there is a launcher
