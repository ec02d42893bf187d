"""Where a new record goes, and how one is begun beside a process that does not wait for it.

A launch of one process imports this alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from headway.contract.user_folders import runtime_folder, user_folder

STAMP = "%Y%m%d-%H%M%S"
"""How the name of a run begins: the time, in UTC."""
_MOST_OPEN = 2**16  # descriptors that are closed
_NICE = 10
_WITHIN_S = 0.5  # where a record is waited for
_COLLECTED_WITHIN_S = 10.0  # after its start, by a PID 1 that collects processes now and then
TITLE = "headway record"
"""The arguments that `ps` shows of the process that begins a record."""


def runs_folder(environ: Mapping[str, str] = os.environ) -> str:
    """Return the folder of all records, whether or not it exists."""
    return os.path.join(user_folder("state", environ), "runs")


def new_path(environ: Mapping[str, str] = os.environ) -> str:
    """Return the path of a new run's folder; nothing is created.

    Its name is the time and some digits: launches of one second, also in containers that share
    the home folder, have names of their own.
    """
    name = f"{time.strftime(STAMP, time.gmtime())}-{os.urandom(3).hex()}"
    return os.path.join(runs_folder(environ), name)


def beside(do: Callable[[bool], object]) -> None:
    """Do something in a process that neither this one, nor what it becomes, has to wait for.

    It has no terminal and no open file of this one's. Forked twice: the first child ends at once,
    so the second is nobody's here, and the container's PID 1 collects it. Where that collects none,
    each would stay as a zombie, so that the first child waits for the second. `do` is called with
    whether it is waited for.
    """
    is_awaited = _has_left_zombie()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        if inner := os.fork():
            until = time.monotonic() + _WITHIN_S * is_awaited
            while time.monotonic() < until and not os.waitpid(inner, os.WNOHANG)[0]:
                time.sleep(0.002)
        else:
            os.setsid()
            os.nice(0 if is_awaited else _NICE)
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            os.closerange(3, _MOST_OPEN)
            with suppress(Exception):  # nobody is there to be told
                from headway.contract.forking import set_title

                set_title(TITLE)
                if not is_awaited:
                    _note_process()
                do(is_awaited)
    finally:
        os._exit(0)


def _has_left_zombie() -> bool:
    """Return whether the process that was noted has ended, and nobody has collected it."""
    with suppress(OSError):
        noted = _noted()
        is_old = time.time() - os.lstat(noted).st_mtime > _COLLECTED_WITHIN_S
        return is_old and _state(os.readlink(noted)) == "Z"
    return False


def _note_process() -> None:
    """Note this process, unless the one that is noted is still there."""
    from headway.contract.figures_file import make_private

    noted = _noted()
    with suppress(OSError):
        make_private(os.path.dirname(noted))
        if os.path.lexists(noted) and not _state(os.readlink(noted)):
            os.unlink(noted)
        os.symlink(str(os.getpid()), noted)


def _noted() -> str:
    """Return the path of the link whose target is the number of such a process."""
    return os.path.join(runtime_folder(), "recorder")


def _state(pid: str) -> str:
    """Return the state of a process, as in /proc; empty for one that is not there."""
    with suppress(OSError):
        if pid.isdecimal():
            with open(f"/proc/{pid}/stat", "rb") as file:
                return file.read().rpartition(b")")[2].split()[0].decode()
    return ""
