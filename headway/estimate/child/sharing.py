"""What processes share, for a script that starts none: nothing of it is seen from outside.

Shared memory is files of the scratch folder, and the locks of `multiprocessing` are those of
threads: a process that is started could be followed neither by them nor by anything else.
"""

from __future__ import annotations

import _multiprocessing  # type: ignore[import-not-found]
import _posixshmem  # type: ignore[import-not-found]
import os
import threading
import time
from multiprocessing import resource_tracker
from typing import Any

from headway.estimate.child.replacing import replace

_FOLDER = "/dev/shm"  # of shm_open(3)
_RECURSIVE = 0  # the kind of a lock that its thread can take again


def replace_sharing() -> None:
    """Keep what is shared in this process, whose files are kept apart already.

    Relies on the modules in C of `multiprocessing`, which its Python code looks into at each call.
    """

    def open_shared(path: str, flags: int, mode: int = 0o777) -> int:
        return os.open(f"{_FOLDER}/{path.lstrip('/')}", flags | os.O_CLOEXEC, mode)

    def unlink_shared(path: str) -> None:
        os.unlink(f"{_FOLDER}/{path.lstrip('/')}")

    replace(_posixshmem, "shm_open", open_shared)
    replace(_posixshmem, "shm_unlink", unlink_shared)
    replace(_multiprocessing, "SemLock", Semaphore)
    for name in (
        "register",
        "unregister",
        "ensure_running",
    ):  # which would start a process that cleans up
        replace(resource_tracker, name, _nothing)


def _nothing(*_: Any) -> None:
    """Do nothing."""


class Semaphore:
    """A semaphore, or a lock that its thread can take again; as `_multiprocessing.SemLock`.

    Args:
        kind: 0 for a recursive lock, 1 for a semaphore.
        value: how often it can be taken now.
        maxvalue: how often it can be taken at most.
    """

    SEM_VALUE_MAX = _multiprocessing.SemLock.SEM_VALUE_MAX

    def __init__(self, kind: int, value: int, maxvalue: int, *_: Any, **__: Any) -> None:
        self.kind, self.maxvalue = kind, maxvalue
        self.name = None
        self.handle = id(self)
        self._value = value
        self._held = 0
        self._holder = 0
        self._changed = threading.Condition()

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Take it, after a wait of at most `timeout` seconds; return whether it was taken."""
        end = None if timeout is None else time.monotonic() + max(timeout, 0.0)
        with self._changed:
            if self.kind == _RECURSIVE and self._is_mine():
                self._held += 1
                return True
            while not self._value:
                left = None if end is None else end - time.monotonic()
                if not block or (left is not None and left <= 0):
                    return False
                self._changed.wait(left)
            self._value -= 1
            self._held += 1
            self._holder = threading.get_ident()
            return True

    def release(self) -> None:
        """Give it back.

        Raises:
            AssertionError: another thread holds this recursive lock.
            ValueError: it was given back more often than it can be taken.
        """
        with self._changed:
            if self.kind == _RECURSIVE and not self._is_mine():
                raise AssertionError("attempt to release recursive lock not owned by thread")
            if self.kind != _RECURSIVE and self._value >= self.maxvalue:
                raise ValueError("semaphore or lock released too many times")
            self._held -= 1
            if self.kind != _RECURSIVE or not self._held:
                self._value += 1
                self._changed.notify()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _count(self) -> int:
        return self._held

    def _is_mine(self) -> bool:
        return self._held > 0 and self._holder == threading.get_ident()

    def _get_value(self) -> int:
        return self._value

    def _is_zero(self) -> bool:
        return not self._value
