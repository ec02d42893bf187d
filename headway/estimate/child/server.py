"""Imports torch once, and forks a process for each attempt that it reads from standard input.

An attempt is a line of JSON, and so is its outcome.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import time
from contextlib import suppress

from headway.estimate.attempt import Attempt, Outcome, decode_attempt, encode
from headway.estimate.child.run import Run
from headway.estimate.child.script_lines import line_in

_MARGIN_S = 20.0  # for a script that holds up its own alarm


def main() -> None:
    """Answer until standard input ends."""
    _import_for_all()
    for line in sys.stdin:
        print(encode_answer(decode_attempt(line)), flush=True)


def encode_answer(attempt: Attempt) -> str:
    """Make an attempt in a process of its own; return the line with its outcome."""
    reader, writer = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.setsid()
        try:
            Run(attempt, writer).to_the_end()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        text = _read(reader, began + attempt.time_limit_s + _MARGIN_S)
    finally:
        os.close(reader)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if text.endswith("\n"):
        return text.rstrip("\n")
    code = os.waitstatus_to_exitcode(status)
    ended = f"the process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
    output = _output(attempt)
    line = line_in(output)
    return encode(Outcome(failed_at=f"{line}: {ended}" if line else ended, output=output))


def _output(attempt: Attempt) -> str:
    path = os.path.join(attempt.scratch, "output")
    if not os.path.exists(path):
        return ""
    with open(path, errors="replace") as file:
        return file.read()[-4000:]


def _read(fd: int, deadline: float) -> str:
    """Return all that is written to a pipe until its end, a line's end, or the deadline."""
    parts: list[bytes] = []
    while (left := deadline - time.monotonic()) > 0 and not (parts and parts[-1][-1:] == b"\n"):
        if not select.select([fd], [], [], left)[0]:
            break
        part = os.read(fd, 2**16)
        if not part:
            break
        parts.append(part)
    return b"".join(parts).decode()


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
