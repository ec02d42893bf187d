"""The process that begins a record beside a launch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.distributed.launching import environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")

# adopts what a launch leaves behind, as PID 1 of a container does, and collects nothing
NEVER_COLLECTS = """
import os, pathlib, psutil, time
from headway.contract.forking import adopt_orphans
from headway.history import place

place.runtime_folder = lambda: "runtime"
place._COLLECTED_WITHIN_S = 0.2
adopt_orphans()
zombies = lambda: [one.status() for one in psutil.Process().children()].count("zombie")
for number in range(4):
    done = pathlib.Path(f"done-{number}")
    place.beside(lambda is_awaited: done.write_text(f"awaited: {is_awaited}"))
    while number == 0 and not zombies():
        time.sleep(0.01)
    time.sleep(0.3)
    print(done.read_text(), "zombies:", zombies())
"""


@pytest.mark.processes
def test_launches_below_a_pid_1_that_collects_no_processes_leave_one_zombie_and_not_one_each() -> (
    None
):
    command = [sys.executable, "-c", NEVER_COLLECTS]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=120, check=True
    )
    said = ["awaited: False zombies: 1", *["awaited: True zombies: 1"] * 3]
    assert done.stdout.splitlines() == said
