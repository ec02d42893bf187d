"""The only way in which tests become another user: what is imported late is found also then.

Only root can, and its checkout, environment and Python may lie where only root may enter.
"""

from __future__ import annotations

import os
import stat
import sys
import traceback
from collections.abc import Callable

import pytest

NOBODY = 65534

needs_root = pytest.mark.skipif(
    sys.platform != "linux"
    or os.getuid() != 0
    or not all(os.stat(path).st_mode & stat.S_IXOTH for path in filter(os.path.isdir, sys.path)),
    reason="only root can become another user, who reads an open checkout by Linux's /proc/self/fd",
)


def become(uid: int, *groups: int) -> None:
    """Make this process one of this user, in this group of the same number and in these.

    The folders of packages and modules are held open, and from here on found through that: who
    enters an open folder is not asked what they may do in those above it.
    """
    folders = sorted(filter(os.path.isabs, filter(os.path.isdir, sys.path)), key=len, reverse=True)
    ways = {folder: f"/proc/self/fd/{os.open(folder, os.O_RDONLY)}" for folder in folders}

    def way_to(path: str) -> str:
        for folder, way in ways.items():
            if f"{path}/".startswith(f"{folder.rstrip('/')}/"):
                return way + path[len(folder) :]
        return path

    for paths in [sys.path, *(getattr(mod, "__path__", None) for mod in [*sys.modules.values()])]:
        if isinstance(paths, list):
            paths[:] = map(way_to, paths)
    os.setgroups(groups)
    os.setgid(uid)
    os.setuid(uid)


def fork_as(uid: int, call: Callable[[], object]) -> int:
    """Return the pid of a fork that calls this as that user; exit code 0 says it was true."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            become(uid)
            code = 0 if call() else 1
        except BaseException:  # noqa: BLE001  the fork must not go on as this test
            traceback.print_exc()
        finally:
            os._exit(code)
    return child
