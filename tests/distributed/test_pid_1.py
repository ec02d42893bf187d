"""As PID 1 of a container, a launch ends by SIGTERM and leaves no zombies."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.distributed.launching import HEADWAY, begin, finished, script
from tests.distributed.networks import needs_namespaces
from tests.waiting import wait_until

pytestmark = [pytest.mark.distributed, needs_namespaces]

LEAVES_AN_ORPHAN = """
import subprocess, time
subprocess.run(["sh", "-c", "(sleep 0.2; touch orphan_has_ended) & exit"])
time.sleep(1000)
"""


@pytest.mark.parametrize("count", ["1", "2"])
def test_a_launch_that_is_pid_1_ends_by_sigterm_and_reaps_orphans(count: str) -> None:
    space = ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child"]
    words = ["--cpu", "--num-processes", count, script(LEAVES_AN_ORPHAN)]
    process = begin([*space, *HEADWAY, *words])
    wait_until(Path("orphan_has_ended").exists, process)
    [init] = psutil.Process(process.pid).children()

    def has_zombies() -> bool:
        below = init.children(recursive=True)
        return any(one.status() == psutil.STATUS_ZOMBIE for one in below)

    wait_until(lambda: not has_zombies(), process)
    init.send_signal(signal.SIGTERM)
    finished(process, 128 + signal.SIGTERM)
