"""Processes that the ranks of a successful run have started and left running."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from headway.contract.notes import named, say
from headway.launcher.processes.starter import Starter

if TYPE_CHECKING:
    from psutil import Process

_SAY_AFTER_S = 1.0  # what ends with its rank is gone by then
_MAX_NAMES = 8


def wait_for_left_processes(starter: Starter, ranks: Mapping[int, int], grace_s: float) -> None:
    """Return once they have all ended, or after `grace_s` seconds; say once which are waited for.

    `ranks` has the ranks by pid.
    """
    began = time.monotonic()
    is_said = False
    while left := starter.left_processes():
        import psutil

        waited_s = time.monotonic() - began
        if waited_s >= grace_s:
            say(f"{grace_s:.0f} s are over: ending {_names(left)}")
            return
        if waited_s >= _SAY_AFTER_S and not is_said:
            is_said = True
            say(f"waiting up to {grace_s:.0f} s for {describe(left, ranks)}")
        next_s = grace_s if is_said else min(_SAY_AFTER_S, grace_s)
        psutil.wait_procs(left, timeout=next_s - waited_s)


def describe(left: Sequence[Process], ranks: Mapping[int, int]) -> str:
    """Return 1 process that rank 0 left: sleep (pid 4242)."""
    owners = sorted({rank for one in left if (rank := _rank_of(one, ranks)) is not None})
    count = f"{len(left)} process{'es' * (len(left) > 1)}"
    return f"{count} that {named(owners) if owners else 'the ranks'} left: {_names(left)}"


def _names(left: Sequence[Process]) -> str:
    names = [f"{_name(one)} (pid {one.pid})" for one in left[:_MAX_NAMES]]
    return ", ".join([*names, *(["..."] if len(left) > _MAX_NAMES else [])])


def _name(process: Process) -> str:
    import psutil

    with suppress(psutil.Error):
        return process.name()
    return "process"


def _rank_of(process: Process, ranks: Mapping[int, int]) -> int | None:
    """Return the rank that started a process: that of its session, else that of its variables."""
    import psutil

    with suppress(OSError):
        session = os.getsid(process.pid)
        if session in ranks:
            return ranks[session]
    with suppress(psutil.Error, KeyError, ValueError):
        return int(process.environ()["RANK"])
    return None
