"""The folders of this user's profiles and records."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress

_OF_XDG = {"config": ("XDG_CONFIG_HOME", ".config"), "state": ("XDG_STATE_HOME", ".local/state")}


def user_folder(kind: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return this user's folder for `config` or `state`, whether or not it exists.

    Source: the XDG Base Directory Specification; on a Mac, Apple's File System Programming Guide.
    """
    if sys.platform == "darwin":
        return os.path.join(home(), "Library", "Application Support", "headway")
    variable, usual = _OF_XDG[kind]
    folder = environ.get(variable, "")
    if not os.path.isabs(folder):  # the XDG specification says to ignore relative paths
        folder = os.path.join(home(), usual)
    return os.path.join(folder, "headway")


def runtime_folder() -> str:
    """Return the folder of this user's sockets and files of running processes; it may not exist."""
    if sys.platform == "linux":
        folder = "/tmp"  # not TMPDIR, which schedulers set for each job
    else:
        import tempfile

        folder = tempfile.gettempdir()
    return os.path.join(folder, f"headway-run-{os.geteuid()}")


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


def home() -> str:
    """Return this user's home folder; `/` for a user without an entry in the password database."""
    folder = os.path.expanduser("~")
    if folder == "/":  # HOME is empty
        import pwd

        with suppress(KeyError):  # as in a container with an arbitrary user id
            folder = pwd.getpwuid(os.getuid()).pw_dir
    return folder if os.path.isabs(folder) else "/"
