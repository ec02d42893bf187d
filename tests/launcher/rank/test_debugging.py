"""The terminal that a debugged rank borrows."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.distributed.launching import environment

CLOSED = """
import os, pty
from headway.launcher.rank.debugging import lent_terminal
ours, theirs = pty.openpty()
os.dup2(theirs, 0)
with lent_terminal():
    os.close(ours)
print("ended")
"""


@pytest.mark.processes
def test_a_terminal_that_is_closed_while_it_is_lent_is_no_error() -> None:
    command = [sys.executable, "-c", CLOSED]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.stdout == "ended\n", done.stderr
