"""Confinement of a script: writes are redirected to a scratch folder.

New folders, and files opened for writing, are created at the same path below the scratch folder and
read from there afterwards. Removing or renaming files outside that folder is skipped with a note;
changes to modes, owners and times are ignored. An audit hook denies other changes, new processes
and network access. Native code, which raises no audit events, is not confined.
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]
import _posixsubprocess
import builtins
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NoReturn

from headway.estimate.child.patching import line_now, replace

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate"), (0,)),
    **dict.fromkeys(("os.rename", "os.link"), (0, 1)),
    "os.symlink": (1,),
}
"""Audit events that report changes, with the positions of the changed paths in their arguments."""
_ATTRIBUTES = ("chmod", "chown", "chflags", "utime", "setxattr", "removexattr")
_PROCESSES = ("fork", "forkpty", "exec", "posix_spawn", "system")
_NETWORK = (
    *("connect", "bind", "sendto", "sendmsg"),
    *("getaddrinfo", "gethostbyname", "gethostbyaddr"),
)
_DENIED = {
    **{f"os.{name}": "file attributes are read-only" for name in _ATTRIBUTES},
    **{f"os.{name}": "starting processes is not allowed" for name in _PROCESSES},
    "subprocess.Popen": "starting processes is not allowed",
    **{f"socket.{name}": "network access is not allowed" for name in _NETWORK},
}
_READ_ONLY = ("mode=ro", "mode=memory", ":memory:")  # sqlite databases


class Confinement:
    """Redirects changes to `scratch`, a folder given by an absolute path without symbolic links."""

    def __init__(self, scratch: str, note: Callable[[str], None]) -> None:
        self._scratch = scratch
        self._note = note
        self._removed: set[str] = set()

    def begin(self) -> None:
        """Confine this process permanently."""
        folder = os.path.join(self._scratch, "tmp")
        os.makedirs(folder)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        self._patch_open()
        self._patch_folders()
        self._patch_changes()
        self._block_unaudited()
        sys.addaudithook(self._audit)

    def _is_free(self, path: Any) -> bool:
        absolute = self._absolute(path)
        return absolute == os.devnull or f"{absolute}/".startswith(f"{self._scratch}/")

    def _absolute(self, path: Any) -> str:
        return os.path.realpath(os.fsdecode(path))

    def _scratch_path(self, path: Any) -> Any:
        """Return the path below the scratch folder that replaces `path` for writing."""
        if isinstance(path, int) or self._is_free(path):
            return path
        return os.path.join(self._scratch, "files", self._absolute(path).lstrip(os.sep))

    def _path_to_read(self, path: Any) -> Any:
        """Return the path to read from, which is in the scratch folder for written files."""
        placed = self._scratch_path(path)
        return placed if placed is not path and os.path.lexists(placed) else path

    def _path_to_write(self, path: Any) -> Any:
        """Return the path to write to, after creating its folder and copying the file's content."""
        placed = self._scratch_path(path)
        if placed is path or os.path.lexists(placed):
            return placed
        folder = os.path.dirname(self._absolute(path))
        if os.path.isdir(folder) or os.path.isdir(self._scratch_path(folder)):
            os.makedirs(os.path.dirname(placed), exist_ok=True)
        if os.path.isfile(path) and self._absolute(path) not in self._removed:
            shutil.copyfile(path, placed)
        return placed

    def _patch_open(self) -> None:
        open_file, open_fd = io.open, os.open

        def place_for(file: Any, mode: str) -> Any:
            if not isinstance(file, (str, bytes, os.PathLike)):
                return file
            is_written = any(letter in mode for letter in "wax+")
            return self._path_to_write(file) if is_written else self._path_to_read(file)

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            return open_file(place_for(file, mode), mode, *args, **kwargs)

        def opened_fd(
            path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
        ) -> int:
            if dir_fd is None:
                path = self._path_to_write(path) if flags & _WRITING else self._path_to_read(path)
            return open_fd(path, flags, mode, dir_fd=dir_fd)

        builtins.open = io.open = opened
        os.open = opened_fd

    def _patch_folders(self) -> None:
        make, is_there = os.mkdir, os.path.exists

        def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            placed = self._scratch_path(path)
            if placed is not path:
                if is_there(path) and self._absolute(path) not in self._removed:
                    raise FileExistsError(17, os.strerror(17), path)
                os.makedirs(os.path.dirname(placed), exist_ok=True)
            make(placed, mode, dir_fd=dir_fd)

        def reading(read: Callable[..., Any]) -> Callable[..., Any]:
            def seen(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
                is_path = isinstance(path, (str, bytes, os.PathLike))
                if is_path and kwargs.get("dir_fd") is None and not os.path.lexists(path):
                    path = self._path_to_read(path)
                return read(path, *args, **kwargs)

            return seen

        os.mkdir = mkdir
        for name in ("stat", "listdir", "scandir", "access"):
            setattr(os, name, reading(getattr(os, name)))

    def _patch_changes(self) -> None:
        shutil._use_fd_functions = False  # type: ignore[attr-defined]  # use full paths
        for module, name, count in (
            *((os, name, 1) for name in ("remove", "unlink", "rmdir", "truncate")),
            *((os, name, 2) for name in ("rename", "replace", "link", "symlink")),
            (shutil, "rmtree", 1),
        ):
            full_name = f"{module.__name__}.{name}"
            setattr(module, name, self._redirected(full_name, getattr(module, name), count))
        for attribute in _ATTRIBUTES:
            for name in (attribute, f"l{attribute}", f"f{attribute}"):
                if hasattr(os, name):
                    setattr(os, name, _ignore_change)

    def _redirected(self, name: str, change: Callable[..., Any], count: int) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            paths = [self._path_to_read(args[0]), *map(self._scratch_path, args[1:count])]
            if all(isinstance(path, int) or self._is_free(path) for path in paths):
                for path in paths[1:]:
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                return change(*paths, *args[count:], **kwargs)
            if os.path.lexists(args[0]) or kwargs.get("ignore_errors"):
                self._removed.add(self._absolute(args[0]))
                self._note(f"skipped {name}({os.fsdecode(args[0])!r})")
                return None
            raise FileNotFoundError(2, os.strerror(2), args[0])

        return changed

    def _block_unaudited(self) -> None:
        starting = "fork_exec: starting processes is not allowed"
        sharing = "shm_open: sharing memory with other processes is not allowed"
        _posixsubprocess.fork_exec = lambda *_: self._deny(starting)
        replace(_posixshmem, "shm_open", lambda *_, **__: self._deny(sharing))

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if (flags or 0) & _WRITING:
                self._require_free(event, path)
        elif event in _CHANGES:
            for index in _CHANGES[event]:
                self._require_free(event, args[index])
        elif event in _DENIED:
            self._deny(f"{event}: {_DENIED[event]}")
        elif event in ("os.kill", "os.killpg") and args[0] not in (0, os.getpid()):
            self._deny(f"{event}: signaling other processes is not allowed")
        elif event == "sqlite3.connect" and not any(text in str(args[0]) for text in _READ_ONLY):
            self._require_free(event, args[0])

    def _require_free(self, event: str, path: Any) -> None:
        if isinstance(path, (str, bytes, os.PathLike)) and not self._is_free(path):
            self._deny(f"{event}: changing {os.fsdecode(path)!r} is not allowed")

    def _deny(self, what: str) -> NoReturn:
        self._note(what)
        # an OSError, because many scripts handle OSErrors
        raise PermissionError(13, f"denied by `headway estimate`: {what}; {line_now()}")


def _ignore_change(path: Any, *_: Any, dir_fd: int | None = None, **__: Any) -> None:
    """Ignore a change to file attributes; raise OSError if the file does not exist."""
    os.stat(path, dir_fd=dir_fd)
