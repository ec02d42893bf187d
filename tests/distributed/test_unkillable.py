"""A process that SIGKILL does not remove, as a tracer holds it, is named, and left after 10 s."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.distributed.families import FAMILY, family_script, survivors, wait_for_families
from tests.distributed.launching import on_linux, script, start

pytestmark = on_linux

TRACER = """
import ctypes, os, sys
PTRACE_SEIZE = 0x4206
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
seized = [libc.ptrace(PTRACE_SEIZE, int(pid), 0, 0) for pid in sys.argv[1:]]
print(*seized, flush=True)
sys.stdin.read()  # and does not wait for what it traces
"""


@pytest.mark.long
def test_a_killed_rank_and_its_child_that_a_tracer_holds_do_not_hold_the_launcher_up() -> None:
    flags = ["-q", "--cpu", "--num-processes", "2", "--grace-period-s", "0"]
    process = start(*flags, script(family_script(FAMILY)))
    families = wait_for_families(process, 2)
    rank, child = families[1][:2]
    with subprocess.Popen(
        [sys.executable, "-c", TRACER, str(rank), str(child)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as tracer:
        assert tracer.stdout is not None
        answer = tracer.stdout.readline()
        if answer.split() != ["0", "0"]:
            pytest.skip("this system does not let a process trace another")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
        tracer.kill()
    assert process.returncode == 130
    assert f"rank 1 (process {rank}) has been killed, but is " in errors
    assert not survivors()
