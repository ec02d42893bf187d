"""The file in which a process without a launcher keeps its figures, for `headway top`.

It is in a folder that only its user may enter, and the process has it locked for as long as it
lives: whoever gets the lock knows that the process has ended, and removes the file. Locks are those
of fcntl, which children do not inherit.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from headway.contract.lines import decode, encode, kinds_of
from headway.contract.progress import Progress, identity
from headway.contract.records import Figures
from headway.contract.user_folders import runtime_folder

_PREFIX = "steps-"
_SIZE = 4096  # bytes of a file; written at once


class Alone(NamedTuple):
    """A process that trains without a launcher."""

    pid: int
    program: str
    began_at: float  # seconds since the epoch
    figures: Figures | None = None  # None before the first record


_KINDS = kinds_of(Alone)


def make_private(folder: str) -> None:
    """Make a folder that nobody else may enter; PermissionError if somebody made it otherwise."""
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if not is_private(folder):
        raise PermissionError(errno.EPERM, "is not a folder that only you may enter", folder)


def is_private(folder: str) -> bool:
    """Return whether a folder is this user's, and nobody else may enter it."""
    try:
        status = os.lstat(folder)
    except FileNotFoundError:
        return False
    is_closed = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    return is_closed and status.st_uid == os.geteuid()


class FiguresFile:
    """This process's file, until it ends."""

    def __init__(self, program: str) -> None:
        self._state = Alone(os.getpid(), program[-1000:], time.time())
        folder, name = runtime_folder(), os.urandom(8).hex()
        make_private(folder)
        unlocked = os.path.join(folder, name)
        self._path = os.path.join(folder, _PREFIX + name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(unlocked, flags, 0o600)
        fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._identity = identity(self._fd)
        self._write()
        os.rename(unlocked, self._path)

    def tell(self, figures: Figures) -> None:
        """Replace the figures in the file; errors are ignored."""
        self._state = self._state._replace(figures=figures)
        with suppress(OSError):
            self._write()

    def _write(self) -> None:
        line = encode(self._state)
        is_ours = os.getpid() == self._state.pid and identity(self._fd) == self._identity
        if len(line) <= _SIZE and is_ours:  # a script may close descriptors, and reuse them
            os.pwrite(self._fd, line.ljust(_SIZE), 0)

    def remove(self) -> None:
        if os.getpid() == self._state.pid:
            with suppress(OSError):
                os.unlink(self._path)


@cache
def leave_figures(progress: Progress) -> None:
    """Keep the figures of this process's steps in a file, from now on until it ends."""
    with suppress(OSError):  # no such folder can be made: the training is not seen
        left = FiguresFile(sys.argv[0])
        progress.report_to(left.tell)
        atexit.register(left.remove)


def list_alone() -> list[Alone]:
    """Return this user's processes here that train without a launcher; remove what others left."""
    folder = runtime_folder()
    names = os.listdir(folder) if is_private(folder) else []
    paths = [os.path.join(folder, name) for name in names if name.startswith(_PREFIX)]
    found = [alone for path in paths for alone in _read(path)]
    return sorted(found, key=lambda one: one.began_at)


def _read(path: str) -> Iterator[Alone]:
    with suppress(OSError, ValueError), open(path, "r+b") as file:  # of another version, or ended
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            found: Alone = decode(_KINDS, file.read(_SIZE))
            yield found
        else:
            os.unlink(path)
