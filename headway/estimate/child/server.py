"""Imports torch once, and forks a process for each attempt that it reads from standard input.

An attempt is a line of JSON, and so is its outcome. The end of standard input, however the planner
was ended, ends this process and the attempt that it has begun, and removes what that has written.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from headway.contract import signals
from headway.contract.lines import decode, encode, kinds_of
from headway.estimate.attempt import (
    Attempt,
    Outcome,
    decode_outcome,
    scratch_prefix,
)
from headway.estimate.child.run import OUTCOME, OUTPUT, Run
from headway.estimate.child.script_lines import line_in

_SIGNAL_AT_PARENTS_DEATH = 1  # prctl(2)
_MARGIN_S = 20.0  # for a script that holds up its own alarm
_OUTPUT_BYTES = 4000
_MOST_BYTES = 2**24  # of an outcome


def main() -> None:
    """Answer until standard input ends."""
    signals.ignore(signal.SIGINT)  # Ctrl-C ends the planner
    _import_for_all()
    woken = _woken_by_children()
    for line in sys.stdin:
        with _scratch_folder() as scratch:
            outcome = _outcome(decode(kinds_of(Attempt), line), scratch, woken)
        sys.stdout.write(encode(outcome).decode())
        sys.stdout.flush()


def _woken_by_children() -> int:
    """Return a descriptor that can be read from when a child has ended."""
    woken, wakes = os.pipe()
    for one in (woken, wakes):
        os.set_blocking(one, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signals.outlive(signal.SIGCHLD)
    return woken


@contextmanager
def _scratch_folder() -> Iterator[str]:
    """Yield a folder that is removed afterwards, whatever a script has made in it."""
    scratch = tempfile.mkdtemp(prefix=scratch_prefix(os.getpid()))
    try:
        yield scratch
    finally:
        try:
            shutil.rmtree(scratch)
        except (OSError, RecursionError):  # nested too deep for Python, or without permissions
            for command in (("chmod", "-R", "u+rwx"), ("rm", "-rf")):
                subprocess.run([*command, scratch], stderr=subprocess.DEVNULL, check=False)


def _outcome(attempt: Attempt, scratch: str, woken: int) -> Outcome:
    """Make an attempt in a process of its own."""
    deadline = time.monotonic() + attempt.time_limit_s + _MARGIN_S
    child = os.fork()
    if child == 0:
        try:
            _follow(attempt, scratch, woken)
        finally:
            os._exit(1)
    status = _wait(child, woken, deadline)
    output = _text(os.path.join(scratch, OUTPUT), _OUTPUT_BYTES)
    with suppress(ValueError):
        found = decode_outcome(_text(os.path.join(scratch, OUTCOME), _MOST_BYTES))
        return found._replace(output=output)
    code = os.waitstatus_to_exitcode(status)
    ended = f"the process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
    line = line_in(output)
    return Outcome(failed_at=f"{line}: {ended}" if line else ended, output=output)


def _follow(attempt: Attempt, scratch: str, woken: int) -> None:
    """Make an attempt in this process, with nothing of the one that it was forked from."""
    _end_with_parent()
    os.close(signal.set_wakeup_fd(-1))
    os.close(woken)
    os.setsid()
    signals.do_as_usual(signal.SIGCHLD, signal.SIGINT)
    Run(attempt, scratch).to_the_end()


def _end_with_parent() -> None:
    """Let the kernel kill this process when the one that it was forked from has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_DEATH, int(signal.SIGKILL), 0, 0, 0)


def _wait(child: int, woken: int, deadline: float) -> int:
    """Return the status of a child that has ended, or is ended at the deadline.

    Raises:
        SystemExit: nobody waits for it any more: standard input has ended.
    """
    ended = status = 0
    try:
        while not ended and (left := deadline - time.monotonic()) > 0:
            ready = select.select([woken, sys.stdin], [], [], left)[0]
            if sys.stdin in ready:  # there is no second attempt before this one's outcome
                raise SystemExit
            if woken in ready:
                os.read(woken, 2**10)
            ended, status = os.waitpid(child, os.WNOHANG)
    finally:
        with suppress(ProcessLookupError, PermissionError):  # macOS refuses where all have ended
            os.killpg(child, signal.SIGKILL)
        if not ended:
            os.kill(child, signal.SIGKILL)  # which may have no group of its own yet
            _, status = os.waitpid(child, 0)
    return status


def _text(path: str, most_bytes: int) -> str:
    """Return the end of a file's text; empty unless it is an ordinary file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return ""
            file.seek(max(0, status.st_size - most_bytes))
            return file.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""


def _import_for_all() -> None:
    """Import what most scripts need, and keep it out of the garbage collector's way."""
    import torch._dynamo  # the first step of any optimizer imports it
    import torch.distributed.fsdp
    import torch.distributed.nn.functional
    import torch.utils.checkpoint  # noqa: F401
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    gc.freeze()


if __name__ == "__main__":
    main()
