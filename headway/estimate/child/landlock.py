"""Lets the kernel refuse changes of files outside one folder, and the network, to native code too.

Linux 5.13 has it for files, 6.7 for TCP, 6.12 for signals. Source: landlock(7), linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all architectures
_GET_VERSION = 1
_BENEATH = 1
_NO_NEW_PRIVILEGES = 38  # prctl(2)
_WRITE_FILE = 1 << 1
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # REMOVE_DIR to MAKE_SYM
_REFER, _TRUNCATE = 1 << 13, 1 << 14  # of versions 2 and 3
_TCP = 0b11  # of version 4: bind, connect
_SIGNALS = 0b10  # of version 6: the scope of signals


def version() -> int:
    """Return the kernel's version of Landlock; 0 where it has none."""
    if sys.platform != "linux":
        return 0
    found: int = _libc().syscall(_CREATE_RULESET, None, 0, _GET_VERSION)
    return max(found, 0)


def confine(writable: Iterable[str]) -> bool:
    """Refuse this process, for good, to change files elsewhere, to use TCP, and to signal others.

    Args:
        writable: folders and files that it may change.

    Returns:
        Whether the kernel does so.
    """
    found = version()
    if not found:
        return False
    changes = _CHANGES | (_REFER if found >= 2 else 0) | (_TRUNCATE if found >= 3 else 0)
    attributes = struct.pack("=QQQ", changes, _TCP, _SIGNALS)
    size = 24 if found >= 6 else 16 if found >= 4 else 8
    libc = _libc()
    ruleset = libc.syscall(_CREATE_RULESET, attributes, size, 0)
    if ruleset < 0:
        return False
    try:
        for path in writable:
            with suppress(FileNotFoundError):
                _allow(libc, ruleset, path, changes)
        refused: int = libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        refused = refused or libc.syscall(_RESTRICT_SELF, ruleset, 0)
        return refused == 0
    finally:
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, changes: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        allowed = changes if os.path.isdir(path) else changes & (_WRITE_FILE | _TRUNCATE)
        libc.syscall(_ADD_RULE, ruleset, _BENEATH, struct.pack("=Qi", allowed, fd), 0)
    finally:
        os.close(fd)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
