"""What tests share: whether the long forms run, and waiting for what other processes do."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable

IS_LONG = "LONG_TESTS" in os.environ  # with --long: what is random is repeated more often


def wait_until(
    is_so: Callable[[], object],
    *beside: subprocess.Popen[str],
    within_s: float = 120,
    every_s: float = 0.01,
) -> None:
    """Wait until something is so.

    Args:
        beside: processes that must not end before; what they have written is shown if one does.
        within_s: for machines that do much else; what takes longer hangs.

    Raises:
        AssertionError: it was not so in time, or a process has ended.
    """
    deadline = time.monotonic() + within_s
    while not is_so():
        ended = [process for process in beside if process.poll() is not None]
        assert not ended, [(process.returncode, process.communicate()) for process in ended]
        assert time.monotonic() < deadline, f"it was not so within {within_s} s"
        time.sleep(every_s)


def wait_for_lines(process: subprocess.Popen[str], *texts: str) -> str:
    """Read the stderr of a process until these were said, in this order; return the last line.

    The limit is that of the test.
    """
    assert process.stderr is not None
    said: list[str] = []
    for text in texts:
        while text not in (line := process.stderr.readline()):
            said.append(line)
            assert line, f"it ended without {text!r}: {''.join(said)}"
    return line
