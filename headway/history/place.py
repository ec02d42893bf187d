"""Where a new record goes, and how one is begun beside a process that does not wait for it.

A launch of one process imports this alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from headway.contract.user_folders import user_folder

STAMP = "%Y%m%d-%H%M%S"
"""How the name of a run begins: the time, in UTC."""
_MOST_OPEN = 2**16  # descriptors that are closed
_NICE = 10
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


def beside(do: Callable[[], object]) -> None:
    """Do something in a process that neither this one, nor what it becomes, has to wait for.

    It has no terminal and no open file of this one's. Forked twice: the first child ends at once,
    so the second is nobody's here.

    Raises:
        OSError: there can be no further process.
    """
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        if not os.fork():
            os.setsid()
            os.nice(_NICE)
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            os.closerange(3, _MOST_OPEN)
            with suppress(Exception):  # nobody is there to be told
                from headway.contract.forking import set_title

                set_title(TITLE)
                do()
    finally:
        os._exit(0)
