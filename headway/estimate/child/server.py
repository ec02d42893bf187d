"""Imports torch once, and forks a process for each attempt that it reads from standard input.

An attempt is a line, and so is its outcome. The end of standard input, however the planner was
ended, ends this process and the attempt that it has begun, and removes what that has written.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import tempfile
import time
from contextlib import suppress
from typing import IO

from headway.contract import signals
from headway.contract.forking import become_new, wake_on_child_end
from headway.contract.lines import decode, encode, kinds_of
from headway.estimate.attempt import Attempt, Outcome
from headway.estimate.child.patching import line_in
from headway.estimate.child.run import OUTCOME, Run

_MARGIN_S = 20.0  # for a script that holds up its own alarm
_OUTPUT_BYTES = 4000


def main() -> None:
    """Answer until standard input ends."""
    signals.ignore(signal.SIGINT)  # Ctrl-C ends the planner
    _import_for_all()
    wake_fds = wake_on_child_end()
    for line in sys.stdin:
        attempt = decode(kinds_of(Attempt), line)
        with (
            tempfile.TemporaryDirectory(
                prefix="headway-estimate-", ignore_cleanup_errors=True
            ) as scratch,
            tempfile.TemporaryFile() as output,
        ):
            outcome = _outcome(attempt, scratch, output, wake_fds)
        sys.stdout.write(encode(outcome).decode())
        sys.stdout.flush()


def _import_for_all() -> None:
    """Import what most scripts need, and keep it out of the garbage collector's way."""
    import torch._dynamo  # the first step of any optimizer imports it
    import torch.distributed.fsdp
    import torch.distributed.nn.functional
    import torch.utils.checkpoint  # noqa: F401
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    gc.freeze()


def _outcome(
    attempt: Attempt, scratch: str, output: IO[bytes], wake_fds: tuple[int, int]
) -> Outcome:
    """Make an attempt in a process of its own, which prints to `output`."""
    deadline = time.monotonic() + attempt.time_limit_s + _MARGIN_S
    server, child = os.getpid(), os.fork()
    if child == 0:
        try:
            printed = output.fileno()
            become_new(server, [os.open(os.devnull, os.O_RDONLY), os.dup(printed), os.dup(printed)])
            for fd in wake_fds:
                os.close(fd)
            signals.do_as_usual(signal.SIGINT)
            Run(attempt, scratch).to_the_end()
        finally:
            os._exit(1)
    status = _wait(child, wake_fds[0], deadline)
    output.seek(max(0, output.seek(0, os.SEEK_END) - _OUTPUT_BYTES))
    text = output.read().decode(errors="replace")
    with suppress(OSError, ValueError), open(os.path.join(scratch, OUTCOME), "rb") as file:
        found: Outcome = decode(kinds_of(Outcome), file.read())
        return found._replace(output=text)
    code = os.waitstatus_to_exitcode(status)
    ended = f"the process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
    line = line_in(text)
    return Outcome(failed_at=f"{line}: {ended}" if line else ended, output=text)


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
        if not ended:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
    return status
