"""Nothing of a run lives on: neither what SIGKILL leaves nor what ranks started."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import psutil
import pytest

from tests.distributed.families import (
    FAMILY,
    family_script,
    process_of_this_test,
    processes_of_this_test,
    survivors,
    wait_for_families,
)
from tests.distributed.launching import HEADWAY, begin, finished, launch, on_linux, script, start
from tests.distributed.networks import needs_namespaces
from tests.waiting import IS_LONG, wait_until

pytestmark = on_linux


def start_families(count: int, *words: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a run with children of every kind; return the pids of its ranks too."""
    for earlier in Path.cwd().glob("pids_?"):
        earlier.unlink()
    flags = ["-q", "--cpu", "--supervise", "--num-processes", str(count), "--grace-period-s", "0"]
    process = start(*flags, *words, script(family_script(FAMILY)))
    return process, [pids[0] for pids in wait_for_families(process, count).values()]


def above(rank: int, launcher: int) -> list[psutil.Process]:
    """Return the processes from a rank's parent up to the launcher."""
    found = []
    for parent in process_of_this_test(rank).parents():
        found.append(parent)
        if parent.pid == launcher:
            return found
    raise AssertionError("the launcher is not above its rank")


def kill_suspended(processes: list[psutil.Process]) -> None:
    """Kill processes at one instant, as far as they can see."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            process.send_signal(number)


@pytest.mark.timeout(3600)
def test_nothing_survives_two_of_the_three_above_the_ranks_killed_together() -> None:
    names = ("fork server", "guardian", "launcher")
    often = product(names, (1, 2, 8) * 8, ("fork", "exec"))
    for spared, count, method in often if IS_LONG else [("guardian", 2, "fork")]:
        process, ranks = start_families(count, "--set", f"start_method={method}")
        ours = dict(zip(names, above(ranks[0], process.pid), strict=True))
        kill_suspended([pid for name, pid in ours.items() if name != spared])
        process.communicate(timeout=120)
        assert not survivors(), (spared, count, method)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_nothing_survives_any_one_process_killed_forty_eight_times() -> None:
    chosen = random.Random(0)
    for _ in range(48):
        process, ranks = start_families(2)
        victim = chosen.choice(processes_of_this_test())
        what = victim.cmdline()
        victim.kill()
        if victim.pid not in [process.pid, *ranks]:
            process.terminate()  # the run may go on without it
        process.communicate(timeout=120)
        assert not survivors(), what


ORPHANS = """
import os, subprocess, sys, time
import psutil
for _ in range(30):
    subprocess.run(["sh", "-c", "sleep 0 &"], check=True)
subprocess.run(["sh", "-c", "sleep 300 &"], check=True)  # the adopted ones are there by now
def adopted():
    every = psutil.process_iter(["name", "ppid", "status"])
    return [one for one in every if one.info["ppid"] == os.getppid()]
while any(one.info["status"] == psutil.STATUS_ZOMBIE for one in adopted()):
    time.sleep(0.05)
[left] = [one for one in adopted() if one.info["name"] == "sleep"]
left.kill()
"""


def test_orphans_of_a_rank_are_reaped_when_they_end() -> None:
    process = start("-q", "--cpu", "--supervise", script(ORPHANS))
    finished(process, 0)


@pytest.mark.long
def test_a_suspended_fork_server_does_not_hold_a_stop_up() -> None:
    process, ranks = start_families(2)
    above(ranks[0], process.pid)[0].suspend()
    process.terminate()
    process.communicate(timeout=120)
    assert not survivors()


@pytest.mark.parametrize(
    ("suspended", "killed"),
    [
        (["guardian"], ["fork server"]),
        (["guardian"], ["launcher"]),
        (["fork server", "guardian"], ["launcher"]),
        (["fork server"], ["guardian", "launcher"]),
        pytest.param(["fork server"], ["launcher"], marks=pytest.mark.long),
    ],
)
def test_nothing_survives_of_a_run_that_is_killed_while_parts_of_it_are_suspended(
    suspended: list[str], killed: list[str]
) -> None:
    process, ranks = start_families(2)
    ours = dict(
        zip(["fork server", "guardian", "launcher"], above(ranks[0], process.pid), strict=True)
    )
    for number, names in ((signal.SIGSTOP, suspended), (signal.SIGKILL, killed)):
        for name in names:
            ours[name].send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert not survivors()
    if "launcher" not in killed:
        assert process.returncode == 128 + signal.SIGKILL
        assert "the launcher's fork server was killed by SIGKILL" in errors, errors
        assert errors.count("error: ") == 1


UPLOADING = """
import os, subprocess
wait = "while [ ! -e go ]; do sleep 0.1; done; touch uploaded_" + os.environ["RANK"]
subprocess.Popen(["sh", "-c", wait], start_new_session=os.environ["RANK"] == "1")
"""


def await_uploads(count: int) -> None:
    wait_until(lambda: len(list(Path.cwd().glob("uploaded_?"))) == count)


def test_children_of_ranks_that_succeeded_end_by_themselves_and_are_named() -> None:
    process = start("-q", "--cpu", "--num-processes", "2", script(UPLOADING))
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("headway: waiting up to 30 s for remaining processes: sh (pid ")
    Path("go").touch()
    await_uploads(2)
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


def test_children_that_ignore_sigterm_are_killed_after_the_grace_period() -> None:
    words = ["--num-processes", "2", "--grace-period-s", "1", script(DEAF)]
    done = launch("-q", "--cpu", *words, code=0)
    assert "terminating remaining processes after 1 s: " in done.stderr
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


TRACER = """
import ctypes, os, sys
PTRACE_SEIZE = 0x4206
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
seized = [libc.ptrace(PTRACE_SEIZE, int(pid), 0, 0) for pid in sys.argv[1:]]
print(*seized, flush=True)
sys.stdin.read()  # and does not wait for what it traces
"""


@pytest.mark.long
def test_a_killed_rank_and_its_child_that_a_tracer_holds_do_not_hold_the_launcher_up() -> None:
    flags = ["-q", "--cpu", "--num-processes", "2", "--grace-period-s", "0"]
    process = start(*flags, script(family_script(FAMILY)))
    rank, child = wait_for_families(process, 2)[1][:2]
    with subprocess.Popen(
        [sys.executable, "-c", TRACER, str(rank), str(child)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as tracer:
        assert tracer.stdout is not None
        answer = tracer.stdout.readline()
        if answer.split() != ["0", "0"]:
            pytest.skip("this system does not let a process trace another")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
        tracer.kill()
    assert process.returncode == 130
    assert f"rank 1 (process {rank}) has been killed, but is " in errors
    assert not survivors()


LEAVES_AN_ORPHAN = """
import subprocess, time
subprocess.run(["sh", "-c", "(sleep 0.2; touch orphan_has_ended) & exit"])
time.sleep(1000)
"""


@needs_namespaces
@pytest.mark.parametrize("count", ["1", "2"])
def test_a_launch_that_is_pid_1_ends_by_sigterm_and_reaps_orphans(count: str) -> None:
    space = ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child"]
    words = ["--cpu", "--num-processes", count, script(LEAVES_AN_ORPHAN)]
    process = begin([*space, *HEADWAY, *words])
    wait_until(Path("orphan_has_ended").exists, process)
    [init] = psutil.Process(process.pid).children()

    def has_zombies() -> bool:
        zombies = (one for one in psutil.process_iter(["status"]) if one.info["status"] == "zombie")
        return not {*init.children(recursive=True)}.isdisjoint(zombies)

    wait_until(lambda: not has_zombies(), process)
    init.send_signal(signal.SIGTERM)
    finished(process, 128 + signal.SIGTERM)
