"""What a worker process tells its launcher: records, one JSON line each, up the status channel.

Without a launcher nobody listens, and telling costs next to nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

_BEAT_EVERY_S = 1.0


class Crash(NamedTuple):
    """How an unhandled exception ended a rank's program."""

    time: float  # seconds since the epoch
    kind: str  # the exception's class
    message: str
    traceback: str  # as Python prints it, without the launcher's frames
    is_from_torch: bool = False  # it was raised in a file of torch's
    code: int = 1  # what the process is about to end with; negative for a signal


class Progress(NamedTuple):
    """How far a training has come."""

    step: int = 0  # optimizer steps done
    phase: str = "script"  # what the runtime is doing; script: the user's own code


class _Channel:
    """This process's end of the status channel."""

    fd: int | None = None
    identity: tuple[int, int] | None = None  # of what `fd` was opened for
    step, phase = Progress()
    told_at = 0.0  # when the last heartbeat went out, on the monotonic clock


def open_channel(fd: int) -> None:
    """Send this process's records to `fd`; what it forks is another process, and sends none."""
    _Channel.fd, _Channel.identity = fd, identity(fd)
    os.register_at_fork(after_in_child=_close_channel)


def _close_channel() -> None:
    _Channel.fd = None


def identity(fd: int) -> tuple[int, int] | None:
    """Return what tells this open file, pipe or socket from all others; None where it is closed."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def is_heard() -> bool:
    """Return whether a launcher listens.

    A script may close all descriptors that it does not know, and use their numbers again.
    """
    if _Channel.fd is not None and identity(_Channel.fd) != _Channel.identity:
        _Channel.fd = None
    return _Channel.fd is not None


def tell(**record: object) -> None:
    """Send one record, if anybody listens."""
    if is_heard():
        assert _Channel.fd is not None
        with suppress(OSError):  # the launcher is gone
            os.write(_Channel.fd, encode_record(record))


def progress() -> Progress:
    """Return how far this process has come."""
    return Progress(_Channel.step, _Channel.phase)


def enter_phase(phase: str) -> None:
    """Note what the runtime does from now on; `script` when it returns to the script."""
    _Channel.phase = phase
    if _Channel.fd is not None:
        _beat()


def set_step(step: int) -> None:
    """Note how many optimizer steps are done."""
    _Channel.step = step


def _beat() -> None:
    """Send a heartbeat, at most one each second."""
    now = time.monotonic()
    if now - _Channel.told_at > _BEAT_EVERY_S:
        _Channel.told_at = now
        tell(beat=True, progress=progress())


def encode_record(record: Mapping[str, object]) -> bytes:
    """Return a record as the line that goes up the status channel."""
    return json.dumps(record).encode() + b"\n"


def decode_records(data: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """Return the records in what has come up a status channel, and the unfinished rest."""
    *lines, rest = data.split(b"\n")
    return [json.loads(line) for line in lines], rest
