"""What has left its parent is found and ended, also where the system does not list processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headway.launcher.rank import process_cleanup
from tests.distributed.launching import environment

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="subreapers"),
]

WITHOUT_PROC = """
import subprocess, sys
import psutil
from headway.contract.forking import adopt_orphans
from headway.launcher.rank.process_cleanup import end_descendants, has_children

class NoProcess:
    def __init__(self, pid=None):
        raise psutil.NoSuchProcess(pid or 1)

psutil.Process = NoProcess
adopt_orphans()
subprocess.run(["sh", "-c", "sleep 300 & setsid sleep 300 & (trap '' TERM; sleep 300) &"])
assert has_children()
end_descendants(0)
assert not has_children()
"""


def test_descendants_are_ended_without_a_list_of_processes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PROC],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_where_numbers_have_begun_anew_few_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def is_child(pid: int) -> bool:
        asked.append(pid)
        return pid in (40, 30_007)

    monkeypatch.setattr(os, "getpid", lambda: 30_000)
    monkeypatch.setattr(process_cleanup, "_newest_number", lambda: 50)
    monkeypatch.setattr(process_cleanup, "_is_child", is_child)
    assert [child.pid for child in process_cleanup._find_children()] == [40, 30_007]
    assert len(asked) < 10_000
