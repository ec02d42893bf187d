"""The terminal that a debugged rank borrows."""

from __future__ import annotations

import sys

import pytest

from tests.distributed.launching import run

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
    done = run([sys.executable, "-c", CLOSED])
    assert done.stdout == "ended\n", done.stderr
