"""The hang doctor on real ranks of plain torch scripts, deep in gloo while they are asked."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from headway.ipc.records import Collective, Group
from tests.distributed.launching import HEADWAY, environment, launch, on_linux, run, script, start
from tests.waiting import wait_for_lines

pytestmark = on_linux

TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist

def train(way):
    dist.init_process_group("gloo")
    x, odd = torch.ones(4), dist.get_rank() == 1
    for _ in range(5):
        dist.all_reduce(x)
    if odd and way == "sleep":
        time.sleep(1000)  # sleeps
    if odd and way == "leave":
        sys.exit()  # leaves
    dist.all_reduce(x)  # waits

train(sys.argv[1])
"""


def line_of(mark: str, text: str = TRAIN) -> str:
    number = next(n for n, line in enumerate(text.splitlines(), 1) if f"# {mark}" in line)
    return f"{Path.cwd() / 'train.py'}:{number} in train"


def ended(way: str, *words: str) -> subprocess.CompletedProcess[str]:
    return launch("--cpu", "--num-processes", "4", *words, script(TRAIN, "train.py"), way)


# fresh interpreters need some seconds for their imports, during which nothing moves
@pytest.mark.parametrize(
    ("method", "timeout"), [("fork", "3"), pytest.param("exec", "12", marks=pytest.mark.long)]
)
def test_a_rank_that_sleeps_is_named_with_collective_number_and_line(
    method: str, timeout: str
) -> None:
    options = ["--hang-timeout", timeout, "--set", f"start_method={method}"]
    done = ended("sleep", *options)
    assert done.returncode == 124
    behind = f"rank 1 has not entered all_reduce #6, at {line_of('sleeps')}"
    waiting = f"ranks 0, 2-3 wait in all_reduce #6, at {line_of('waits')}"
    assert f"error: no progress for {timeout} s: {behind}" in done.stderr
    assert waiting in done.stderr
    assert done.stderr.count("ranks 0, 2-3, most recent call last:") == 1


def test_a_rank_that_left_is_named_and_not_the_one_that_lost_it() -> None:
    done = ended("leave")
    assert done.returncode == 1
    words = rf"error: rank 1 exited \(exit code 0, by sys.exit at {re.escape(line_of('leaves'))}\) "
    assert re.search(words + "before all_reduce #6; rank [023] then failed", done.stderr)
    assert re.search(
        rf"waits? in all_reduce #6, at {re.escape(line_of('waits'))}",
        done.stderr.partition("error:")[2],
    )


def test_a_communication_error_is_explained_while_the_others_still_run() -> None:
    text = TRAIN.replace(
        '("gloo")', '("gloo", timeout=__import__("datetime").timedelta(seconds=5))'
    )
    done = launch("--cpu", "--num-processes", "3", script(text, "train.py"), "sleep")
    assert done.returncode == 1
    assert f"error: rank 1 has not entered all_reduce #6, at {line_of('sleeps')}" in (done.stderr)


def test_stacks_are_told_on_request_and_the_ranks_go_on() -> None:
    name = script(TRAIN, "train.py")
    # a shell script starts background jobs with SIGQUIT ignored
    first = "import signal; signal.signal(signal.SIGQUIT, signal.SIG_IGN)"
    running = start("--cpu", "--num-processes", "2", name, "sleep", first=first)
    try:
        told = _stacks_once(str(running.pid), "not entered all_reduce #6")
        assert f"rank 1 has not entered all_reduce #6, at {line_of('sleeps')}" in told
        below = psutil.Process(running.pid).children(recursive=True)
        rank = next(process for process in below if "rank 1" in str(process.cmdline()))
        assert "most recent call last" in _stack(str(rank.pid)).stdout
        assert running.poll() is None
        running.send_signal(signal.SIGQUIT)  # as Ctrl-\ does
        wait_for_lines(running, "headway: ranks 0-1: last progress")
    finally:
        running.terminate()
        running.communicate(timeout=120)


def _stacks_once(pid: str, words: str) -> str:
    """Ask until the ranks have come to where the words are true."""
    deadline = time.monotonic() + 60
    while words not in (told := _stack(pid).stdout) and time.monotonic() < deadline:
        time.sleep(0.25)
    return told


def _stack(*words: str) -> subprocess.CompletedProcess[str]:
    return run([*HEADWAY[:-1], "stack", *words])


def test_a_process_that_a_signal_would_end_is_left_alone() -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        refused = _stack(str(bystander.pid))
        assert refused.returncode == 4
        assert "does not belong to a launch" in refused.stderr
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    assert _stack("no-number").returncode == 2


def test_a_launcher_that_was_stopped_itself_calls_nobody_hanging() -> None:
    text = "import time\nfor tick in range(30):\n    print(tick, flush=True)\n    time.sleep(0.2)\n"
    running = start("-q", "--cpu", "--supervise", "--hang-timeout", "3", script(text))
    assert running.stdout is not None
    running.stdout.readline()
    running.send_signal(signal.SIGSTOP)
    time.sleep(4)
    running.send_signal(signal.SIGCONT)
    _, errors = running.communicate(timeout=120)
    assert running.returncode == 0, errors


def test_a_script_that_closes_all_descriptors_keeps_its_files_clean() -> None:
    text = """
import os
os.closerange(3, 1000)
files = [open(f"data_{number}", "wb") for number in range(20)]
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
"""
    launch("--cpu", "--num-processes", "1", "--supervise", script(text))
    written = [path for path in Path.cwd().glob("data_*") if path.stat().st_size]
    assert len(list(Path.cwd().glob("data_*"))) == 20
    assert not written


def test_output_and_collectives_are_progress() -> None:
    text = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for second in range(20):
    time.sleep(0.5)
    if sys.argv[1] == "collectives":
        dist.all_reduce(torch.ones(1))
    elif dist.get_rank() == 0:
        print(second, flush=True)
dist.destroy_process_group()
"""
    words = ["--cpu", "--num-processes", "2", "--hang-timeout", "8", script(text)]
    for process in [start(*words, way) for way in ("collectives", "output")]:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


def test_heartbeats_of_the_runtime_tell_step_and_phase() -> None:
    text = """
import time, torch
from headway import Accelerator
accelerator = Accelerator()
model, data = torch.nn.Linear(1, 1), torch.utils.data.DataLoader(torch.ones(64, 1), batch_size=1)
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)

class Stuck(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        if step == 3 and accelerator.process_index == 1:
            time.sleep(1000)  # stuck
        return gradient

for step, batch in enumerate(data):
    accelerator.backward(Stuck.apply(model(batch)).mean())
    optimizer.step()
"""
    done = launch("--cpu", "--num-processes", "2", "--hang-timeout", "6", script(text, "train.py"))
    assert done.returncode == 124
    number = line_of("stuck", text).replace(" in train", " in backward")
    assert f"in step 4 (backward), at {number}" in done.stderr


@pytest.mark.usefixtures("executed_starts")
def test_a_segmentation_fault_shows_its_stack() -> None:
    text = "import ctypes, os\nif os.environ['RANK'] == '1':\n    ctypes.string_at(0)  # crash\n"
    done = launch("--cpu", "--num-processes", "2", script(text, "train.py"))
    assert done.returncode == 139
    assert "error: rank 1 of 2 was killed by SIGSEGV" in done.stderr
    assert "Segmentation fault, most recent call last:" in done.stderr
    assert f'File "{Path.cwd() / "train.py"}", line 3, in <module>' in done.stderr


def test_torchs_timeouts_that_debug_rank_replaces_are_there() -> None:
    import torch.distributed.distributed_c10d as c10d

    assert {"default_pg_timeout", "default_pg_nccl_timeout"} <= {*vars(c10d)}


READ_GROUPS = """
import time, torch, torch.distributed as dist
from headway.launcher.rank.rank_monitor import read_groups
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(4))
while not (group := read_groups()[0]).collectives[0].is_done:  # torch notes it a moment later
    time.sleep(0.01)
assert abs(group.collectives[0].entered_at - time.time()) < 60
print(str(group).replace(str(group.collectives[0].entered_at), "0.0"))
dist.destroy_process_group()
"""


def test_torchs_flight_recorder_has_the_fields_that_are_read() -> None:
    done = run([sys.executable, "-c", READ_GROUPS], environment(TORCH_FR_BUFFER_SIZE="100"))
    collective = Collective(1, "all_reduce", "[4]", True, 0.0)
    assert done.stdout.strip() == str(Group("0", (0,), (collective,))), done.stderr


STUBBORN = """
import signal, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
def train():
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Thread(target=train).start()
"""


def test_a_rank_whose_thread_waits_has_not_left_and_is_named_if_it_had_to_be_killed() -> None:
    flags = ["-q", "--cpu", "--num-processes", "2", "--hang-timeout", "4", "--grace-period-s", "1"]
    done = launch(*flags, script(STUBBORN, "train.py"), code=124)
    assert "rank 1 has not entered all_reduce #2" in done.stderr
    assert 'train.py", line 8, in train' in done.stderr.partition("rank 1, most recent")[2]
    assert "rank 1 was killed because it had not stopped after 1 s (--grace" in done.stderr


def test_a_suspended_rank_handles_sigterm_after_a_hang() -> None:
    text = """
import os, signal, sys
import torch.distributed as dist
signal.signal(signal.SIGTERM, lambda *_: sys.exit("cleaned up"))
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.barrier()
"""
    flags = ["-q", "--cpu", "--num-processes", "2", "--hang-timeout", "4"]
    assert "[1] cleaned up" in launch(*flags, script(text), code=124).stderr


NUM_BUSY = 6
NUM_SLOW = 50
NUM_HANGS = 20

SLOW = """
import random, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
chance = random.Random(int(sys.argv[1]) * 10 + dist.get_rank())
for step in range(12):
    if chance.random() < 0.4:
        time.sleep(chance.random() * 1.5)  # a slow disk
    else:
        torch.ones(200, 200) @ torch.ones(200, 200)
    dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
"""

HANG = """
import ctypes, os, signal, sys, threading, time
import torch, torch.distributed as dist
way, culprit = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
for _ in range(5):
    dist.all_reduce(torch.ones(4))
if dist.get_rank() == culprit:
    if way == "sleep":
        time.sleep(1000)
    elif way == "read":
        os.read(os.pipe()[0], 1)
    elif way == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif way == "loop":
        while True:
            pass
    elif way == "global lock":
        ctypes.PyDLL(None).sleep(1000)
    elif way == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(torch.ones(4))
"""
WAYS = ("sleep", "read", "lock", "loop", "global lock", "stopped")


@pytest.fixture(scope="module")
def busy_machine() -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NUM_BUSY)]
    yield
    for process in busy:
        process.kill()
        process.wait()


def end_of_slow(number: int) -> str:
    """Run a slow training, and return what it says where it does not end well."""
    done = launch("--cpu", "--num-processes", "3", "--hang-timeout", "20", "slow.py", str(number))
    return done.stderr if done.returncode else ""


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("busy_machine")
@pytest.mark.usefixtures("busy_machine")
def test_none_of_50_slow_runs_on_a_busy_machine_is_ended() -> None:
    script(SLOW, "slow.py")
    with ThreadPoolExecutor(2) as pool:
        assert not any(pool.map(end_of_slow, range(NUM_SLOW)))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("busy_machine")
@pytest.mark.usefixtures("busy_machine")
def test_20_of_20_hangs_on_a_busy_machine_are_named_rightly() -> None:
    script(HANG, "hang.py")
    chance = random.Random(7)
    wrong = {}
    for number in range(NUM_HANGS):
        way, culprit = WAYS[number % len(WAYS)], chance.randrange(3)
        words = ["--cpu", "--num-processes", "3", "--hang-timeout", "10", "hang.py"]
        done = launch(*words, way, str(culprit), timeout_s=300)
        names_it = f"error: no progress for 10 s: rank {culprit} (has not entered|does not answer)"
        if done.returncode != 124 or not re.search(names_it, done.stderr):
            wrong[number, way, culprit] = done.stderr[-3000:]
    assert wrong == {}
