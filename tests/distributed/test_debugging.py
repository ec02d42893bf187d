"""`--debug-rank`: one rank has the terminal, the others are silent and wait for it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from pexpect.fdpexpect import fdspawn

from tests.distributed.families import process_of_this_test
from tests.distributed.launching import (
    HEADWAY,
    environment,
    launch,
    popen,
    run,
    script,
    wait_for_end,
)
from tests.terminal import Terminal

pytestmark = pytest.mark.distributed

SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
group = dist.group.WORLD._get_backend(torch.device("cpu"))
seen = {"pid": os.getpid(), "tty": sys.stdin.isatty(), "days": group.options._timeout.days}
seen["stdin"] = "" if rank == 1 else sys.stdin.read()
open(f"seen_{rank}.json", "w").write(json.dumps(seen))
print("before", rank)
dist.barrier()
secret = 6 * 7
breakpoint()
total = torch.ones(1) * rank
dist.all_reduce(total)
print("total", total.item(), flush=True)
dist.destroy_process_group()
"""
WORDS = ["--cpu", "--num-processes", "3", "--debug-rank", "1"]


def seen() -> list[dict[str, object]]:
    return [json.loads(Path(f"seen_{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("way", ["fork", pytest.param("exec", marks=pytest.mark.long)])
def test_a_breakpoint_of_all_ranks_stops_the_debugged_one_and_the_others_wait_in_silence(
    way: str,
) -> None:
    name = script(SCRIPT.replace("breakpoint()", "breakpoint()\nimport pdb; pdb.set_trace()"))
    words = [*WORDS, "--set", f"start_method={way}", "--log-dir", "logs", name]
    done = launch("-q", *words, typed="p secret\nc\nc\n", PYTHONBREAKPOINT="pdb.set_trace", code=0)
    assert "(Pdb) 42" in done.stdout
    assert "before 1" in done.stdout
    assert done.stdout.count("before") == done.stdout.count("total 3.0") == 1
    assert [rank["stdin"] for rank in seen()] == ["", "", ""]
    assert all(rank["days"] == 21 for rank in seen())
    (run,) = Path("logs").iterdir()
    assert sorted(path.name for path in run.iterdir()) == [
        "rank_0_attempt_0.log",
        "rank_2_attempt_0.log",
    ]
    assert "total 3.0" in (run / "rank_2_attempt_0.log").read_text()


def test_quitting_the_debugger_ends_the_run_as_any_crash() -> None:
    done = launch("-q", *WORDS, script(SCRIPT), typed="q\n", code=1)
    if sys.version_info < (3, 14):  # later ones ask, and exit
        assert "rank 1 of 3 failed with BdbQuit" in done.stderr
        assert "--debug-rank" in done.stderr


@contextmanager
def terminal(*words: str) -> Iterator[tuple[fdspawn, subprocess.Popen[str]]]:
    """Start `headway launch` in the foreground of a terminal, and return its other end."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-c", FOREGROUND, *HEADWAY, "-q", *words]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), follower)
    process = popen(command, env=environment(TERM="xterm"), **streams)
    try:
        yield fdspawn(leader, timeout=120, encoding="utf-8"), process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
        os.close(leader)
        os.close(follower)


def is_default_handler(screen: fdspawn) -> bool:
    """Return whether the terminal echoes, and collects lines."""
    usual = termios.ECHO | termios.ICANON
    return bool(termios.tcgetattr(screen.child_fd)[3] & usual == usual)


FOREGROUND = """
import fcntl, os, signal, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
if (pid := os.fork()) == 0:
    os.setpgid(0, 0)
    os.execve(sys.executable, sys.argv[1:], os.environ)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
os.setpgid(pid, pid)
os.tcsetpgrp(0, pid)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""  # what a shell does; without one in its session, Ctrl-Z could not stop anything


def test_ctrl_c_at_the_prompt_interrupts_and_twice_it_ends_the_run() -> None:
    with terminal(*WORDS, script(SCRIPT)) as (screen, process):
        screen.expect_exact("(Pdb) ")
        assert not is_default_handler(screen)  # the prompt edits lines
        screen.send("p secret + 100\n")
        screen.expect_exact("142")
        screen.expect_exact("(Pdb) ")
        screen.send("\x1b[A\n")  # arrow up: the line again
        screen.expect_exact("142")
        screen.expect_exact("(Pdb) ")
        screen.send("\x1a")  # Ctrl-Z does nothing
        for pause_s in (0.2, 1.2):  # Python listens for Ctrl-C a moment after its prompt is shown
            time.sleep(pause_s)
            screen.send("\x03")
            screen.expect_exact("--KeyboardInterrupt--")
            screen.expect_exact("(Pdb) ")
        for pause_s in (1.2, 0.3):
            time.sleep(pause_s)
            screen.send("\x03")
        screen.expect_exact("\nheadway: interrupted")
        assert process.wait(timeout=120) == 130
        assert is_default_handler(screen)
    wait_for_end(*(int(str(rank["pid"])) for rank in seen()))


def test_a_rank_killed_at_its_prompt_leaves_the_terminal_as_it_was() -> None:
    with terminal(*WORDS, script(SCRIPT)) as (screen, process):
        screen.expect_exact("(Pdb) ")
        assert [rank["tty"] for rank in seen()] == [False, True, False]
        process_of_this_test(int(str(seen()[1]["pid"]))).kill()
        screen.expect_exact("\nerror: rank 1 of 3 was killed by SIGKILL")
        assert process.wait(timeout=120) == 137
        assert is_default_handler(screen)


CLOSED = """
import os, pty
from headway.launcher.rank.debugging import borrowed_terminal
ours, theirs = pty.openpty()
os.dup2(theirs, 0)
with borrowed_terminal():
    os.close(ours)
print("ended")
"""


@pytest.mark.processes
def test_a_terminal_that_is_closed_while_it_is_lent_is_no_error() -> None:
    done = run([sys.executable, "-c", CLOSED])
    assert done.stdout == "ended\n", done.stderr


HAS_A_BAR = """
import sys, time, torch
from headway import Accelerator
accelerator = Accelerator(cpu=True)
data = torch.utils.data.TensorDataset(torch.ones(100_000, 4))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for number, (x,) in enumerate(loader):
    time.sleep(0.02)
    accelerator.backward(model(x).mean())
    optimizer.step()
    if accelerator.is_main_process:
        print(f"\\rbar {number}", end="", file=sys.stderr, flush=True)
        if number == 500:
            print(file=sys.stderr, flush=True)
            breakpoint()
    if number == 800:
        break
accelerator.print("\\ntrained", file=sys.stderr)
"""


@pytest.mark.long
def test_the_line_stays_below_a_bar_gives_way_to_pdb_and_is_gone_at_the_end(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HAS_A_BAR)
    words = ("launch", "--cpu", "--num-processes", "2", str(script))
    with Terminal(None, *words, rows=12, columns=90) as run:

        def lines() -> list[str]:
            return [line for line in run.text.splitlines() if line]

        def ends_with(*starts: str) -> bool:
            last = lines()[-len(starts) :]
            return len(last) == len(starts) and all(map(str.startswith, last, starts))

        run.wait_until(lambda: ends_with("[0] bar", "step "))
        run.resize(12, 40)
        run.wait_until(lambda: ends_with("[0] bar", "step ") and len(lines()[-1]) < 40)
        run.resize(12, 90)
        run.wait_until(lambda: ends_with("[0] (Pdb)"))
        run.press("p 6 * 7\r")
        run.wait_until(lambda: ends_with("[0] (Pdb) p 6 * 7", "[0] 42", "[0] (Pdb)"))
        run.press("c\r")
        run.wait_until(lambda: ends_with("[0] bar", "step "))
        assert run.exit_code() == 0
        assert ends_with("[0] trained")
        assert not any("step " in line and "bar" in line for line in lines())
