"""notebook_launcher and debug_launcher: ranks forked from the process that calls them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.errors import UsageError
from headway.notebook import notebook_launcher
from tests.distributed import launching
from tests.distributed.launching import begin, environment, is_alive, script
from tests.waiting import wait_until

pytestmark = pytest.mark.distributed

TRAIN = """
import os, subprocess, sys, time
from pathlib import Path
from headway import Accelerator, debug_launcher, notebook_launcher

def kill_group(pid, number, usual=os.killpg):
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # fails for another's number
    usual(pid, number)

if hasattr(os, "waitid"):
    os.killpg = kill_group

def train(folder, how):
    accelerator = Accelerator()
    rank = accelerator.process_index
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, f"child{rank}").write_text(str(child.pid))
    total = accelerator.reduce(accelerator.gather(__import__("torch").ones(1))).sum()
    print(f"rank {rank} of {accelerator.num_processes}: {total} {accelerator.mixed_precision}é")
    print("note", file=sys.stderr)
    if how == "fails" and rank == 1:
        raise ValueError("no such sample")
    if how == "killed" and rank == 1:
        os.kill(os.getpid(), 9)
    if how in ("interrupts", "interrupts alone") and rank == 1:
        raise KeyboardInterrupt
    if how in ("fails", "killed", "interrupts", "waits"):
        Path(folder, f"waits{rank}").touch()
        accelerator.wait_for_everyone() if how != "waits" else time.sleep(600)
"""


def run(text: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, script(text)]
    return launching.run(command, environment(CUDA_VISIBLE_DEVICES=""), timeout_s=150)


def run_train(call: str) -> subprocess.CompletedProcess[str]:
    return run(f"{TRAIN}\n{call}\nprint('went on')")


def no_child_is_left(folder: Path) -> bool:
    pids = [int(path.read_text()) for path in folder.glob("child*")]
    return bool(pids) and not any(map(is_alive, pids))  # who reaps orphans may take its time


def test_ranks_form_a_world_and_rank_0_is_shown(tmp_path: Path) -> None:
    call = f"notebook_launcher(train, ({str(tmp_path)!r}, ''), num_processes=2"
    ended = run_train(f"{call}, mixed_precision='bf16')")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split("\n")[:2] == ["rank 0 of 2: 4.0 bf16é", "went on"]
    assert ended.stderr.count("note") == 1
    assert no_child_is_left(tmp_path)


@pytest.mark.parametrize("how", ["fails", "killed", "interrupts", "interrupts alone"])
def test_the_error_is_that_of_the_rank_that_failed_and_nothing_is_left(
    how: str, tmp_path: Path
) -> None:
    ended = run_train(f"debug_launcher(train, ({str(tmp_path)!r}, {how!r}))")
    assert ended.returncode == 1
    assert "WorkerFailed" in ended.stderr
    assert "rank 1 of 2" in ended.stderr
    assert ("ValueError: no such sample" in ended.stderr) == (how == "fails")
    assert ("    raise KeyboardInterrupt\n" in ended.stderr) == how.startswith("interrupts")
    assert no_child_is_left(tmp_path)


def test_ranks_run_their_own_exit_functions_and_their_last_words_are_told() -> None:
    text = """
import atexit, sys
from headway import Accelerator, debug_launcher

def train(how):
    accelerator = Accelerator()
    atexit.register(print, "end of a rank")  # as trackers do
    if how and accelerator.process_index == 1:
        sys.exit(how)
    accelerator.wait_for_everyone()

atexit.register(print, "end of the notebook")
debug_launcher(train, ("",))
debug_launcher(Accelerator(cpu=True).wait_for_everyone)
debug_launcher(train, ("bad arguments",))
"""
    ended = run(text)
    assert ended.stdout.split("\n")[0] == "end of a rank"
    assert ended.stdout.count("end of the notebook") == 1
    assert ended.stderr.count("the function used an Accelerator from outside") == 1
    assert "SystemExit: bad arguments" in ended.stderr


def test_an_interrupt_stops_all_ranks(tmp_path: Path) -> None:
    source = f"{TRAIN}\ndebug_launcher(train, ({str(tmp_path)!r}, 'waits'))"
    process = begin([sys.executable, script(source)], env=environment(CUDA_VISIBLE_DEVICES=""))
    wait_until(lambda: len(list(tmp_path.glob("waits*"))) == 2, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert "KeyboardInterrupt" in errors
    assert no_child_is_left(tmp_path)


def test_one_process_is_the_process_itself() -> None:
    pids: list[int] = []
    notebook_launcher(lambda: pids.append(os.getpid()), num_processes=1)
    assert pids == [os.getpid()]


@pytest.mark.parametrize(
    "arguments",
    [
        *({"num_nodes": 2}, {"max_restarts": 1}, {"rdzv_endpoint": "a:1"}, {"num_process": 2}),
        *({"mixed_precision": "fp7"}, {"num_processes": 0}),
    ],
)
def test_what_cannot_be_obeyed_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        notebook_launcher(print, **arguments)


def test_a_rank_cannot_launch_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError):
        notebook_launcher(print, num_processes=2)
