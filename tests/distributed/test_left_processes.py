"""What ranks started and left running: after a success it may end, after a failure it is ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.families import survivors
from tests.distributed.launching import launch, on_linux, script, start
from tests.waiting import wait_until

pytestmark = on_linux

UPLOADING = """
import os, subprocess
wait = "while [ ! -e go ]; do sleep 0.1; done; touch uploaded_" + os.environ["RANK"]
subprocess.Popen(["sh", "-c", wait], start_new_session=os.environ["RANK"] == "1")
"""


def await_uploads(count: int) -> None:
    wait_until(lambda: len(list(Path.cwd().glob("uploaded_?"))) == count)


@pytest.mark.parametrize(("words", "count"), [(["--supervise"], 1), (["--num-processes", "2"], 2)])
def test_children_of_ranks_that_succeeded_end_by_themselves_and_are_named(
    words: list[str], count: int
) -> None:
    process = start("-q", "--cpu", *words, script(UPLOADING))
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("headway: waiting up to 30 s for what the ranks left: sh (pid ")
    Path("go").touch()
    await_uploads(count)
    output, rest = process.communicate(timeout=120)
    assert (output, "are over" in rest) == ("", False)
    assert process.returncode == 0


DEAF = """
import os, subprocess, time
mark = "deaf_" + os.environ["RANK"]
subprocess.Popen(["sh", "-c", f"trap '' TERM; touch {mark}; while :; do sleep 0.1; done"])
while not os.path.exists(mark):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("words", [["--supervise"], ["--num-processes", "2"]])
def test_children_that_ignore_sigterm_are_killed_after_the_grace_period(words: list[str]) -> None:
    done = launch("-q", "--cpu", *words, "--grace-period-s", "1", script(DEAF), code=0)
    assert "1 s are over: ending " in done.stderr
    assert "sh (pid " in done.stderr
    assert not survivors()


def test_children_of_ranks_that_failed_are_ended_before_the_restart() -> None:
    text = UPLOADING + (
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise SystemExit(3)\n"
        "import psutil\n"
        "beside = psutil.Process(os.getppid()).children()\n"
        "print('left', sum(one.name() == 'sh' for one in beside))\n"
        "open('go', 'w').close()\n"
    )
    words = ["--supervise", "--max-restarts", "1", "--set", "restart_delay=0"]
    done = launch("-q", "--cpu", *words, script(text), code=0)
    assert done.stdout == "left 0\n"
    await_uploads(1)
