"""On a busy machine no slow run is ended, and every hang is named rightly: the long form."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.distributed.launching import launch, script

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.long,
    pytest.mark.xdist_group("busy_machine"),
    pytest.mark.timeout(3600),
    pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux"),
]

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


@pytest.fixture(scope="module", autouse=True)
def busy_machine() -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NUM_BUSY)]
    yield
    for one in busy:
        one.kill()
        one.wait()


def end_of_slow(number: int) -> str:
    """Run a slow training, and return what it says where it does not end well."""
    done = launch("--cpu", "--num-processes", "3", "--hang-timeout", "20", "slow.py", str(number))
    return done.stderr if done.returncode else ""


def test_none_of_50_slow_runs_on_a_busy_machine_is_ended() -> None:
    script(SLOW, "slow.py")
    with ThreadPoolExecutor(2) as pool:
        assert not any(pool.map(end_of_slow, range(NUM_SLOW)))


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
