"""User folders, file helpers and package installers.

No function here treats a disk error as a missing file.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_XDG = {"config": ("XDG_CONFIG_HOME", ".config"), "state": ("XDG_STATE_HOME", ".local/state")}


def user_folder(kind: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return this user's `config` or `state` folder, which may not exist.

    Source: XDG Base Directory Specification; on macOS, Apple's File System Programming Guide.
    """
    if sys.platform == "darwin":
        return os.path.join(home(), "Library", "Application Support", "headway")
    variable, default_folder = _XDG[kind]
    folder = environ.get(variable, "")
    if not os.path.isabs(folder):  # XDG: relative paths must be ignored
        folder = os.path.join(home(), default_folder)
    return os.path.join(folder, "headway")


def home() -> str:
    """Return this user's home folder; `/` if the password database does not list the user."""
    folder = os.path.expanduser("~")
    if folder == "/":  # HOME is empty
        import pwd

        with suppress(KeyError):  # a container may run with an arbitrary user id
            folder = pwd.getpwuid(os.getuid()).pw_dir
    return folder if os.path.isabs(folder) else "/"


def is_absent(path: str | os.PathLike[str]) -> bool:
    """Return whether nothing exists at `path`, not even a broken link.

    On errors other than ENOENT and ENOTDIR, return False, because the path may exist; reading it
    then raises the error.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: invalid path
        return True
    except OSError:
        return False
    return False


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[int]:
    """Open a regular file for reading; raise OSError for a link, pipe, device or folder."""
    if os.path.islink(path):
        raise OSError(errno.ELOOP, "it is a link")
    handle = os.open(path, _OPEN_FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        yield handle
    finally:
        os.close(handle)


def write_atomic(path: str, text: str, *, flushes: bool = False) -> None:
    """Write a file atomically: after an OSError, the file is unchanged, or still does not exist.

    With `flushes`, the text is on the disk before the file is replaced.
    """
    partial = f"{path}-{os.getpid()}"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            if flushes:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            os.unlink(partial)
        raise


def read_plain(path: str | os.PathLike[str], limit: int = sys.maxsize) -> bytes:
    """Return the bytes of a file; raise OSError if it is not regular or is larger than `limit`."""
    with open_regular(path) as handle, open(handle, "rb", closefd=False) as file:
        if os.fstat(handle).st_size > limit:
            raise OSError(errno.EFBIG, f"it has more than {limit} bytes")
        return file.read()


def _has_pip(python: str) -> bool:
    if python == sys.executable:
        return any(os.path.isdir(os.path.join(folder, "pip")) for folder in sys.path)
    from glob import escape, glob

    prefix = escape(os.path.dirname(os.path.dirname(python)))
    return bool(glob(f"{prefix}/lib/python3*/site-packages/pip/"))


def installer_of(python: str) -> str:
    """Return the install command for `python`: pip's, or uv's if the environment has no pip."""
    from shlex import quote  # only an error needs it

    quoted = quote(python)
    if _has_pip(python):
        return f"{quoted} -m pip install"
    return f"uv pip install --python {quoted}"
