"""The hang doctor on real ranks of plain torch scripts, deep in gloo while they are asked."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import HEADWAY, environment, launch, script, start

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
    if odd and way == "differ":
        dist.broadcast(x, 0)  # differs
    dist.all_reduce(x)  # waits

print("begin", flush=True)
train(sys.argv[1])
"""


def line_of(mark: str, text: str = TRAIN) -> str:
    number = next(n for n, line in enumerate(text.splitlines(), 1) if f"# {mark}" in line)
    return f"{Path.cwd() / 'train.py'}:{number} in train"


def ended(way: str, *words: str) -> subprocess.CompletedProcess[str]:
    name = script(TRAIN, "train.py")
    return launch("--cpu", "--num-processes", "4", *words, name, way)


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_a_rank_that_sleeps_is_named_with_collective_number_and_line(method: str) -> None:
    done = ended("sleep", "--hang-timeout", "3", "--start-method", method, "--log-dir", "logs")
    assert done.returncode == 124
    behind = f"rank 1 is behind, and did not enter all_reduce #6, at {line_of('sleeps')}"
    waiting = f"ranks 0, 2-3 wait in all_reduce #6, at {line_of('waits')}"
    assert f"error: no progress for 3 s: {behind}" in done.stderr
    assert waiting in done.stderr
    assert done.stderr.count("ranks 0, 2-3, most recent call last:") == 1
    (report,) = Path("logs").glob("*/failure.json")
    assert json.loads(report.read_text())["explanation"] == [behind, waiting]


def test_a_rank_that_left_is_named_and_not_the_one_that_lost_it() -> None:
    done = ended("leave")
    assert done.returncode == 1
    words = rf"error: rank 1 left \(exit code 0, by sys.exit at {re.escape(line_of('leaves'))}\) "
    assert re.search(words + "before all_reduce #6; rank [023] then failed", done.stderr)
    assert re.search(
        rf"waits? in all_reduce #6, at {re.escape(line_of('waits'))}",
        done.stderr.partition("error:")[2],
    )


def test_ranks_in_different_collectives_are_told_apart() -> None:
    done = ended("differ", "--hang-timeout", "3")
    assert done.returncode == 124
    assert (
        "error: no progress for 3 s: the ranks entered different collectives: "
        f"rank 1 broadcast #6 of [4], at {line_of('differs')}" in done.stderr
    )
    assert f"ranks 0, 2-3 entered all_reduce #6 of [4], at {line_of('waits')}" in done.stderr


def test_a_communication_error_is_explained_while_the_others_still_run() -> None:
    text = TRAIN.replace(
        '("gloo")', '("gloo", timeout=__import__("datetime").timedelta(seconds=2))'
    )
    done = launch("--cpu", "--num-processes", "3", script(text, "train.py"), "sleep")
    assert done.returncode == 1
    assert f"error: rank 1 is behind, and did not enter all_reduce #6, at {line_of('sleeps')}" in (
        done.stderr
    )


def test_stacks_are_printed_on_request_and_the_ranks_go_on() -> None:
    name = script(TRAIN, "train.py")
    running = start("--cpu", "--num-processes", "2", name, "sleep")
    try:
        assert running.stdout is not None
        for _ in range(2):
            assert "begin" in running.stdout.readline()
        told = _stacks_once(running.pid, "did not enter all_reduce #6")
        assert f"rank 1 is behind, and did not enter all_reduce #6, at {line_of('sleeps')}" in told
        rank = next(pid for pid in _below(running.pid) if "rank 1" in _title(pid))
        assert "most recent call last" in _stacks_once(rank, "all_reduce #6")
        assert not Path(tempfile.gettempdir(), f"headway-stack-{running.pid}").exists()
        running.send_signal(signal.SIGQUIT)  # as Ctrl-\ does
        time.sleep(3)
        assert running.poll() is None
    finally:
        running.terminate()
        _, errors = running.communicate(timeout=60)
    assert errors.count("headway: stacks of 2 ranks") >= 3


def _stacks_once(pid: int, words: str) -> str:
    """Ask until the ranks have come to where the words are true."""
    told = ""
    for _ in range(40):
        told = _stack(str(pid)).stdout
        if words in told:
            break
        time.sleep(0.25)
    return told


def _stack(pid: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HEADWAY[:-1], "stack", pid], env=environment(), capture_output=True, text=True, timeout=60
    )


def _below(pid: int) -> list[int]:
    import psutil

    return [one.pid for one in psutil.Process(pid).children(recursive=True)]


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_a_process_that_a_signal_would_end_is_left_alone() -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        refused = _stack(str(bystander.pid))
        assert refused.returncode == 4
        assert "SIGQUIT would end it" in refused.stderr
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    assert _stack("no-number").returncode == 2


def test_output_and_collectives_are_progress() -> None:
    text = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for second in range(10):
    time.sleep(0.5)
    if sys.argv[1] == "collectives":
        dist.all_reduce(torch.ones(1))
    elif dist.get_rank() == 0:
        print(second, flush=True)
dist.destroy_process_group()
"""
    name = script(text)
    for way in ("collectives", "output"):
        done = launch("--cpu", "--num-processes", "2", "--hang-timeout", "3", name, way)
        assert done.returncode == 0, done.stderr


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
    done = launch("--cpu", "--num-processes", "2", "--hang-timeout", "3", script(text, "train.py"))
    assert done.returncode == 124
    number = line_of("stuck", text).replace(" in train", " in backward")
    assert f"in step 4 (backward), at {number}" in done.stderr


def test_a_segmentation_fault_shows_its_stack() -> None:
    text = "import ctypes, os\nif os.environ['RANK'] == '1':\n    ctypes.string_at(0)  # crash\n"
    done = launch("--cpu", "--num-processes", "2", script(text, "train.py"))
    assert done.returncode == 139
    assert "error: rank 1 of 2 was ended by SIGSEGV" in done.stderr
    assert "Segmentation fault, most recent call last:" in done.stderr
    assert f'File "{Path.cwd() / "train.py"}", line 3, in <module>' in done.stderr


def test_torchs_private_names_that_a_rank_answers_with_are_there() -> None:
    import torch.distributed.distributed_c10d as c10d
    from torch._C import _distributed_c10d

    assert callable(c10d._new_process_group_helper)
    assert isinstance(c10d._world.pg_group_ranks, dict)
    dump: Any = _distributed_c10d
    assert "version" in json.loads(dump._dump_fr_trace_json())
