"""Nothing outlives a run, however it ends; and a crash names the right rank, of every kind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from headway.history.record import read_all
from tests.distributed.families import (
    MANNERS,
    family_script,
    process_of_this_test,
    survivors,
    wait_for_families,
)
from tests.distributed.launching import (
    HEADWAY,
    environment,
    is_alive,
    launch,
    on_linux,
    script,
    start,
    start_in_terminal,
)
from tests.waiting import wait_until

pytestmark = on_linux

GRACE_S = 2


def kill_launcher(process: subprocess.Popen[str]) -> None:
    process.kill()


def kill_a_rank(process: subprocess.Popen[str]) -> None:
    process_of_this_test(int(Path("pids_0").read_text().split()[0])).kill()


def kill_the_server(process: subprocess.Popen[str]) -> None:
    rank = process_of_this_test(int(Path("pids_0").read_text().split()[0]))
    rank.parents()[0].kill()


def send(number: int):  # type: ignore[no-untyped-def]
    return lambda process: process.send_signal(number)


def interrupt_twice(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)


STOPS = {  # how the run is ended: what is done, the exit code of polite ranks
    "ctrl-c": (send(signal.SIGINT), 130),
    "ctrl-c twice": (interrupt_twice, 130),
    "SIGTERM": (send(signal.SIGTERM), 143),
    "SIGHUP": (send(signal.SIGHUP), 129),
    "launcher killed": (kill_launcher, -9),
    "terminal closed": (None, 129),
    "rank killed": (kill_a_rank, 137),
    "server killed": (kill_the_server, 137),
}
FULL = [(stop, manner, count) for stop in STOPS for manner in MANNERS for count in (1, 4)]
SHORT = {
    ("ctrl-c", "polite", 4),
    ("SIGTERM", "family", 1),
    ("launcher killed", "stubborn", 4),
    ("launcher killed", "family", 1),
    ("terminal closed", "family", 4),
    ("rank killed", "family", 1),
}


@pytest.mark.parametrize(
    ("stop", "manner", "count"),
    [
        pytest.param(
            *case, marks=() if case in SHORT else pytest.mark.long, id=" ".join(map(str, case))
        )
        for case in FULL
    ],
)
def test_nothing_survives(stop: str, manner: str, count: int) -> None:
    do, code = STOPS[stop]
    words = ["--supervise", "--num-processes", str(count), "--grace-period-s", str(GRACE_S)]
    words = ["-q", "--cpu", *words, script(family_script(MANNERS[manner]))]
    process, terminal = (start(*words), -1) if do else start_in_terminal(*words)
    families = wait_for_families(process, count)
    assert all(is_alive(pid) for pids in families.values() for pid in pids)

    do(process) if do else os.close(terminal)
    process.communicate(timeout=120)
    assert not survivors()
    if manner == "polite":
        assert process.returncode == code
    elif stop.startswith("ctrl-c"):
        assert process.returncode == 130
    if stop == "SIGTERM":
        assert "report='stopped by SIGTERM" in str(read_all()[0])


GROUP = """
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
def step(number):
    if number == 3 and dist.get_rank() == {rank}:
        {fault}
    dist.all_reduce(torch.ones(1))
for number in range(5):
    step(number)
dist.destroy_process_group()
"""
KINDS = {  # what the rank does: what the report says, and the exit code
    "exception": ("raise ValueError('boom')", "failed with ValueError", 1),
    "sys.exit": ("sys.exit(7)", "exited with code 7", 7),
    "os._exit(0)": (
        "os._exit(0)",
        "exited with code 0, by os._exit() or os.exec*(), while other",
        1,
    ),
    "SIGKILL": ("os.kill(os.getpid(), 9)", "was killed by SIGKILL", 137),
    "SIGSEGV": ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV", 139),
    "out of memory": (
        "raise torch.OutOfMemoryError('CUDA out of memory')",
        "failed with OutOfMemoryError",
        1,
    ),
}


@pytest.mark.parametrize(
    ("kind", "rank"),
    [
        pytest.param(kind, rank, marks=() if rank == place % 4 else pytest.mark.long)
        for place, kind in enumerate(KINDS)
        for rank in range(4)
    ],
)
def test_a_crash_names_the_rank_that_failed_first(kind: str, rank: int) -> None:
    fault, words, code = KINDS[kind]
    name = script(GROUP.format(rank=rank, fault=fault))
    done = launch("-q", "--cpu", "--num-processes", "4", name, code=code)
    report = done.stderr[done.stderr.rindex("error: ") :].splitlines()
    assert report[0].startswith(f"error: rank {rank} of 4 {words}")
    assert f"stopped after rank {rank} failed" in report[0], report[0]
    assert len(report) <= 25
    if kind == "exception":
        assert "ValueError: boom" in report[-3]
        assert 'script.py", line 7, in step' in "\n".join(report)
        assert "headway" not in "\n".join(report[:-2])
    if kind == "out of memory":
        assert "reduce the batch size" in report[-1]


def test_ranks_that_all_leave_by_os_exit_are_noticed() -> None:
    launch("-q", "--cpu", "--num-processes", "3", script("import os; os._exit(0)"), code=0)


def test_eight_launches_at_once_all_succeed() -> None:
    name = script(GROUP.format(rank=-1, fault="pass"))
    processes = [start("-q", "--cpu", "--num-processes", "2", name) for _ in range(8)]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, errors


ALONE = """
import atexit, os, resource, sys, time
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
atexit.register(print, "at exit")
try:
    with open("pid", "w") as file: file.write(str(os.getpid()))
    {end}
finally:
    print("finally")
"""
ALONE_ENDS = {  # how one process without a launcher ends, python's exit code
    "SIGINT": ("time.sleep(300)", -signal.SIGINT),
    "SIGTERM": ("time.sleep(300)", -signal.SIGTERM),
    "SIGHUP": ("time.sleep(300)", -signal.SIGHUP),
    "SIGQUIT": ("time.sleep(300)", -signal.SIGQUIT),
    "exception": ("raise ValueError('boom')", 1),
    "sys.exit": ("sys.exit(7)", 7),
    "abort": ("os.abort()", -signal.SIGABRT),
}


@pytest.mark.parametrize("end", ALONE_ENDS)
def test_one_process_ends_as_plain_python_does_and_leaves_nothing(end: str) -> None:
    text, code = ALONE_ENDS[end]
    name = script(ALONE.format(end=text))
    number = signal.Signals[end] if end in signal.Signals.__members__ else None
    plain = run_alone([sys.executable, name], number)
    assert plain[0] == code
    assert run_alone([*HEADWAY, "--cpu", name], number) == plain


def run_alone(command: list[str], number: signal.Signals | None) -> tuple[int, str, list[str]]:
    """Run the script, send the signal while it sleeps; return its code, stdout and stderr."""
    pid = Path("pid")
    pid.unlink(missing_ok=True)
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    if number is not None:
        wait_until(
            lambda: (
                pid.exists()
                and pid.read_text()
                and psutil.Process(process.pid).status() == "sleeping"
            ),
            process,
        )
        process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    assert int(pid.read_text()) == process.pid  # no launcher has stayed
    assert not survivors()  # what writes the run's record ends a moment later
    lines = [line for line in errors.splitlines() if not line.startswith("headway: ")]
    return process.returncode, output, lines


SECRET = "hf_Sq9"
FAILING = """
import os, signal, sys, time
token = os.environ["HF_TOKEN"]
assert len(token) == 6
def train(token):
    if os.environ["RANK"] == "0":
        {end}
    time.sleep(1000)
train(token)
"""
ENDS = {  # how a rank fails, further flags, and the exit code of the run
    "exception": ("raise ValueError('boom')", ("--max-restarts", "1"), 1),
    "signal": ("os.kill(os.getpid(), signal.SIGKILL)", (), 137),
    "hang": ("pass", ("--hang-timeout", "3"), 124),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_report_and_the_logs_of_a_failed_run_hold_no_secret(end: str) -> None:
    text, words, code = ENDS[end]
    Path("headway.yaml").write_text(
        f"env: {{HF_TOKEN: {SECRET}, HTTPS_PROXY: 'http://jane:{SECRET}@proxy:80'}}\n"
        "num_processes: 2\nlog_dir: logs\nrestart_delay: 0\n"
    )
    done = launch("--cpu", *words, script(FAILING.format(end=text)), code=code)
    kept = {path.name: path.read_text() for path in Path("logs").glob("*/*")}
    assert "rank_0_attempt_0.log" in kept
    for shown in (done.stdout, done.stderr, *kept.values()):
        assert SECRET not in shown
