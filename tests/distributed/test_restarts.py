"""A run with restarts left goes on, whatever failed: the script, or what starts its ranks."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from tests.distributed.families import survivors
from tests.distributed.launching import launch, script, start
from tests.waiting import wait_for_lines, wait_until

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux"),
]

NO_DELAY = ["--set", "restart_delay=0"]


def test_the_same_exception_each_time_is_tried_as_often_as_was_asked_for() -> None:
    name = script("print('tried')\nraise ValueError('always')")
    done = launch("-q", "--cpu", "--supervise", "--max-restarts", "3", *NO_DELAY, name)
    assert done.stdout.count("tried") == 4
    assert "rank 0 failed with ValueError; restart 3 of 3" in done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 7), (signal.SIGINT, 130)])
def test_a_stop_signal_during_the_delay_of_a_restart_ends_the_run(number: int, code: int) -> None:
    words = ["--supervise", "--max-restarts", "1", "--set", "restart_delay=60"]
    process = start("-q", "--cpu", *words, script("print('tried')\nraise SystemExit(7)"))
    wait_for_lines(process, "restart 1 of 1 in 60 s")
    process.send_signal(number)
    out, _ = process.communicate(timeout=50)  # before the delay is over
    assert (out, process.returncode) == ("tried\n", code)


KILLING = """
import os, signal, sys, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(300)
print("done")
"""


def test_a_fork_server_that_was_killed_is_started_again_where_restarts_are_left() -> None:
    words = ["-q", "--cpu", "--num-processes", "2", *NO_DELAY]
    done = launch(*words, "--max-restarts", "1", script(KILLING))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
    assert "the process that starts the ranks was ended by SIGKILL; restart 1 of 1" in done.stderr


def test_a_fork_server_that_was_killed_ends_a_run_without_restarts_which_says_so() -> None:
    done = launch("-q", "--cpu", "--num-processes", "2", script(KILLING))
    assert done.returncode == 137
    (report,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "the process that starts the ranks was ended by SIGKILL" in report


def kill_the_server_at_once(process: subprocess.Popen[str]) -> None:
    """Kill the fork server before it has started a rank."""
    servers: list[psutil.Process] = []

    def has_server() -> bool:
        children = psutil.Process(process.pid).children()
        guardians = [one for one in children if "guardian of" in " ".join(one.cmdline())]
        servers[:] = [child for one in guardians for child in one.children()]
        return bool(servers)

    wait_until(has_server, process, every_s=0)
    servers[0].kill()


@pytest.mark.parametrize(
    ("restarts", "code"), [pytest.param("0", 137, marks=pytest.mark.long), ("1", 0)]
)
def test_a_fork_server_that_was_killed_before_it_started_a_rank_counts_too(
    restarts: str, code: int
) -> None:
    words = ["-q", "--cpu", "--num-processes", "2", "--max-restarts", restarts, *NO_DELAY]
    process = start(*words, script("print('done')"))
    kill_the_server_at_once(process)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    assert out.count("done") == (2 if restarts == "1" else 0)
    assert "the process that starts the ranks was ended by SIGKILL" in errors
    assert not survivors()
