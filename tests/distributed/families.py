"""Ranks with children of every kind, for tests that end a run: all of it must be gone."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import psutil

from tests.waiting import wait_until

POLITE = ""
STUBBORN = """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, lambda *_: None)
"""
FAMILY = """
sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
note(subprocess.Popen(sleep).pid)
note(subprocess.Popen(sleep, start_new_session=True).pid)  # a daemon of the script's
import torch.utils.data
loader = torch.utils.data.DataLoader(range(1000), num_workers=2)
batches = iter(loader)
next(batches)
for worker in batches._workers:
    note(worker.pid)
"""
MANNERS = {"polite": POLITE, "stubborn": STUBBORN, "family": FAMILY}

_PATIENCE_S = 60  # none of a family ends by itself

_SCRIPT = """
import os, signal, subprocess, sys, time
pids = [os.getpid()]
def note(pid):
    pids.append(pid)
{manners}
open("pids_" + os.environ["RANK"] + ".tmp", "w").write(" ".join(map(str, pids)))
os.rename("pids_" + os.environ["RANK"] + ".tmp", "pids_" + os.environ["RANK"])
while True:
    time.sleep(0.1)
"""


def family_script(manners: str) -> str:
    """Return a script that notes the pids of each rank and its children, and never ends."""
    return _SCRIPT.format(manners=manners)


def wait_for_families(process: subprocess.Popen[str], count: int) -> dict[int, list[int]]:
    """Return the pids of each rank's processes, its own first, once all have noted them."""
    wait_until(lambda: len(list(Path.cwd().glob("pids_?"))) == count, process)
    found = sorted(Path.cwd().glob("pids_?"))
    return {int(path.name[-1]): [*map(int, path.read_text().split())] for path in found}


def process_of_this_test(pid: int) -> psutil.Process:
    """Return the process of a number that it has told, which another may have been given since."""
    process = psutil.Process(pid)
    assert process.environ().get("HOME") == os.environ["HOME"], process.cmdline()
    return process


def processes_of_this_test() -> list[psutil.Process]:
    """Return every running process that this test has started, also those that nobody waits for.

    Each test has a HOME of its own.
    """
    home = os.environ["HOME"]
    return [
        process
        for process in psutil.process_iter(["environ", "status"])
        if (process.info["environ"] or {}).get("HOME") == home and process.pid != os.getpid()
    ]


def survivors() -> list[str]:
    """Return what does not end of this test's processes, and end it."""
    deadline = time.monotonic() + _PATIENCE_S
    while (left := processes_of_this_test()) and time.monotonic() < deadline:
        time.sleep(0.05)
    named = [f"{p.pid} {p.name()} {p.cmdline()}" for p in left if p.is_running()]
    for process in left:
        process.kill()
    return named
