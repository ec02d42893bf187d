"""Keeps a script from changing anything: what it writes goes to a scratch folder.

Files opened for writing, and folders made, are those of the same path below the scratch folder;
what was written is read from there. Removing and renaming what is outside is noted and not done;
modes, owners and times of all files stay. An audit hook refuses what goes other ways, and processes
and the network; the kernel keeps native code from changing files (`landlock.py`).
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn
from urllib.parse import parse_qs, urlsplit

from headway.estimate.child.replacing import replace, replace_wherever_imported
from headway.estimate.child.script_lines import line_now
from headway.estimate.child.sharing import replace_sharing

Note = Callable[[str], None]

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    **dict.fromkeys(("os.remove", "os.rmdir", "shutil.rmtree"), ((0, 1),)),
    **dict.fromkeys(("os.rename", "os.link"), ((0, 2), (1, 3))),
    "os.mkdir": ((0, 2),),
    "os.truncate": ((0, None),),
    "os.symlink": ((1, 2),),
    "shutil.move": ((0, None), (1, None)),
}
"""Audit events of changes: which arguments are paths, and which the folders that these are in."""

_ATTRIBUTES = {f"os.{name}" for name in ("chmod", "chown", "utime", "setxattr", "removexattr")}
_ATTRIBUTES |= {"os.chflags"}

_PROCESSES = {
    *("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn"),
    *("os.spawn", "os.startfile", "pty.spawn"),
}
_OWN_PROCESS = {"os.kill", "os.killpg", "resource.prlimit"}
_NETWORK = {
    *("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo"),
    *("socket.gethostbyname", "socket.gethostbyaddr", "urllib.Request"),
}
_CHANGING_IOCTLS = (0x40086602, 0x40046602, 0x401C5820, 0x5412)
"""FS_IOC_SETFLAGS, FS_IOC32_SETFLAGS, FS_IOC_FSSETXATTR; TIOCSTI, which types into a terminal."""

_DEVICES = ("/dev/null", "/dev/tty", "/dev/stdout", "/dev/stderr", "/dev/fd")
_FOLDERS = ("dir_fd", "src_dir_fd", "dst_dir_fd")
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_IN_MEMORY = ("", ":memory:")  # databases of sqlite
_READING = (["ro"], ["memory"])  # in the address of a database


class Refused(PermissionError):
    """A script was kept from changing something; an OSError, which many scripts expect."""


class Confinement:
    """The scratch folder, and what was kept from being done.

    Args:
        scratch: an absolute path without links.
        note: is called with each thing that was not done, and its line.
    """

    def __init__(self, scratch: str, note: Note) -> None:
        self._scratch = scratch
        self._note = note
        self._removed: set[str] = set()

    def begin(self) -> None:
        """Confine this process, for good."""
        folder = os.path.join(self._scratch, "tmp")
        os.makedirs(folder, exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        self._replace_opening()
        self._replace_folders()
        self._replace_removal()
        self._replace_attributes()
        self._replace_temporary_files()
        self._replace_databases()
        self._replace_processes()
        replace_sharing()
        sys.addaudithook(self._audit)

    # ------------------------------------------------------------------ another place

    def place_of(self, path: Any) -> Any:
        """Return where a path lies that is written to: below the scratch folder."""
        if isinstance(path, int) or self._is_free(path):
            return path
        absolute = self._absolute(path)
        return os.path.join(self._scratch, "files", absolute.lstrip(os.sep))

    def _seen(self, path: Any) -> Any:
        """Return where a path lies that is read: below the scratch folder if it was written."""
        if isinstance(path, int) or self._is_free(path):
            return path
        placed = self.place_of(path)
        return placed if os.path.lexists(placed) else path

    def _is_free(self, path: Any) -> bool:
        absolute = self._absolute(path)
        is_scratch = absolute == self._scratch or absolute.startswith(self._scratch + os.sep)
        return is_scratch or absolute in _DEVICES

    def _absolute(self, path: Any) -> str:
        return os.path.realpath(os.fsdecode(path))

    def _for_writing(self, path: Any) -> Any:
        """Return the place of a file that is written to, with its folder and its present text."""
        placed = self.place_of(path)
        if placed is path or os.path.lexists(placed):
            return placed
        folder = os.path.dirname(self._absolute(path))
        if os.path.isdir(folder) or os.path.isdir(self.place_of(folder)):
            os.makedirs(os.path.dirname(placed), exist_ok=True)
        if os.path.isfile(path) and self._absolute(path) not in self._removed:
            shutil.copyfile(path, placed)
        return placed

    def _for_mode(self, file: Any, mode: str) -> Any:
        """Return the place of a file that is opened in such a mode; a descriptor as it is."""
        if not isinstance(file, (str, bytes, os.PathLike)):
            return file
        is_written = any(letter in mode for letter in "wax+")
        return self._for_writing(file) if is_written else self._seen(file)

    def _replace_opening(self) -> None:
        open_file, open_fd = io.open, os.open

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            return open_file(self._for_mode(file, mode), mode, *args, **kwargs)

        class RawFile(io.FileIO):
            def __init__(raw, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
                super().__init__(self._for_mode(file, mode), mode, *args, **kwargs)

        def opened_fd(
            path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
        ) -> int:
            if flags & _WRITING:
                path, dir_fd = self._for_writing(_joined((path, dir_fd), 0, 1)), None
            elif dir_fd is None:
                path = self._seen(path)
            return open_fd(path, flags, mode, dir_fd=dir_fd)

        builtins.open = io.open = opened
        os.open = opened_fd
        replace_wherever_imported("FileIO", RawFile)

    def _replace_folders(self) -> None:
        make, is_there = os.mkdir, os.path.exists

        def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            placed = self.place_of(path)
            if placed is not path:
                if is_there(path) and self._absolute(path) not in self._removed:
                    raise FileExistsError(17, os.strerror(17), path)
                os.makedirs(os.path.dirname(placed), exist_ok=True)
            make(placed, mode, dir_fd=dir_fd)

        def replace_making(name: str) -> None:
            made = getattr(os, name)

            def make_file(path: Any, *args: Any, **kwargs: Any) -> None:
                made(self._for_writing(path), *args, **kwargs)

            setattr(os, name, make_file)

        os.mkdir = mkdir
        for name in ("mkfifo", "mknod"):
            replace_making(name)
        for name in ("stat", "listdir", "scandir", "access"):
            setattr(os, name, self._reading(getattr(os, name)))

    def _reading(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that reads below the scratch folder what is nowhere else."""

        def seen(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, (str, bytes, os.PathLike)) and kwargs.get("dir_fd") is None:
                path = self._written(path)
            return read(path, *args, **kwargs)

        return seen

    def _written(self, path: Any) -> Any:
        """Return the place below the scratch folder of a path that is nowhere else."""
        return path if os.path.lexists(path) else self._seen(path)

    def _replace_removal(self) -> None:
        for module, name, count in (
            *((os, name, 1) for name in ("remove", "unlink", "rmdir", "removedirs")),
            *((os, name, 2) for name in ("rename", "replace", "renames", "link", "symlink")),
            (os, "truncate", 1),
            (shutil, "rmtree", 1),
            (shutil, "move", 2),
        ):
            said, change = f"{module.__name__}.{name}", getattr(module, name)
            changed = self._within(said, change, count)
            setattr(module, name, changed)
            closer = tempfile._TemporaryFileCloser  # type: ignore[attr-defined]
            _replace_default(closer, change, changed)
        if hasattr(tempfile, "_rmtree"):  # a name of its own, in earlier versions of Python
            tempfile._rmtree = shutil.rmtree

    def _within(self, name: str, change: Callable[..., Any], count: int) -> Callable[..., Any]:
        """Return a function that changes only what lies below the scratch folder."""

        def changed(*args: Any, **kwargs: Any) -> Any:
            if any(kwargs.get(one) is not None for one in _FOLDERS):
                return change(*args, **kwargs)  # the audit hook knows what they are
            paths = [self._written_place(one) for one in args[:count]]
            if count == 2:
                paths[1:] = [self.place_of(one) for one in args[1:2]]
            if all(isinstance(one, int) or self._is_free(one) for one in paths):
                for one in paths[1:]:
                    os.makedirs(os.path.dirname(one), exist_ok=True)
                return change(*paths, *args[count:], **kwargs)
            if os.path.lexists(args[0]) or kwargs.get("ignore_errors"):
                self._removed.add(self._absolute(args[0]))
                self._note(f"{name}({os.fsdecode(args[0])!r}) is not done")
                return None
            raise FileNotFoundError(2, os.strerror(2), args[0])

        return changed

    def _replace_attributes(self) -> None:
        for change in ("chmod", "chown", "chflags"):
            for name in (change, f"l{change}", f"f{change}"):
                self._leave_out(name)
        for name in ("utime", "setxattr", "removexattr"):
            self._leave_out(name)

    def _leave_out(self, name: str) -> None:
        """Let a function of `os`, where there is one, not change the file that it is given."""

        def left_out(path: Any, *_: Any, dir_fd: int | None = None, **__: Any) -> None:
            is_file = isinstance(path, int) or dir_fd is not None
            if not is_file and not os.path.lexists(self._seen(path)):
                raise FileNotFoundError(2, os.strerror(2), path)
            if is_file or not self._is_free(self._seen(path)):
                self._note(f"os.{name}({path!r}) is not done")

        if hasattr(os, name):
            setattr(os, name, left_out)

    def _replace_temporary_files(self) -> None:
        """Let temporary files of any folder lie, with their names, below the scratch folder.

        Relies on `tempfile._mkstemp_inner`, by which the module makes all its files: it keeps the
        function that removes them from before.
        """
        make = tempfile._mkstemp_inner  # type: ignore[attr-defined]

        def made(folder: Any, *args: Any, **kwargs: Any) -> Any:
            placed = self.place_of(folder)
            if placed is not folder and os.path.isdir(folder):
                os.makedirs(placed, exist_ok=True)
            return make(placed, *args, **kwargs)

        replace(tempfile, "_mkstemp_inner", made)

    def _replace_databases(self) -> None:
        """Let databases lie below the scratch folder, as other files that are written to."""
        with suppress(ImportError):
            import sqlite3

            connect = sqlite3.connect

            def connected(database: Any, *args: Any, **kwargs: Any) -> Any:
                if not kwargs.get("uri") and database not in _IN_MEMORY:
                    database = self._for_writing(database)
                return connect(database, *args, **kwargs)

            sqlite3.connect = sqlite3.dbapi2.connect = connected

    def _replace_processes(self) -> None:
        """Refuse, with its line, what reaches other processes and raises no audit event."""

        def refuse_start(*_: Any, **__: Any) -> None:
            self._refuse("fork_exec: no other processes are started")

        def refuse_signal(*_: Any, **__: Any) -> None:
            self._refuse("signal.pidfd_send_signal: no other process is reached")

        for name in ("fork_exec", "_fork_exec"):  # of _posixsubprocess and of subprocess
            replace_wherever_imported(name, refuse_start)
        if hasattr(signal, "pidfd_send_signal"):
            signal.pidfd_send_signal = refuse_signal

    def _written_place(self, path: Any) -> Any:
        placed = self.place_of(path)
        return placed if placed is not path and os.path.lexists(placed) else path

    # ------------------------------------------------------------------ refusing

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Refuse what would change something else than the scratch folder."""
        if event == "open":
            path, _, flags = args
            if isinstance(path, (str, bytes)) and (flags or 0) & _WRITING:
                self._require_free(event, path)
        elif event in _CHANGES:
            for path, folder in _CHANGES[event]:
                self._require_free(event, _joined(args, path, folder))
        elif event in _ATTRIBUTES:
            self._refuse(f"{event}: no attributes of files are changed")
        elif event in _PROCESSES:
            self._refuse(f"{event}: no other processes are started")
        elif event in _OWN_PROCESS and args[0] not in (0, os.getpid()):
            self._refuse(f"{event}: no other process is reached")
        elif event in _NETWORK or (event == "socket.__new__" and args[1] in _INTERNET):
            self._refuse(f"{event}: there is no network")
        elif event == "sqlite3.connect":
            self._require_database(event, args[0])
        elif event == "fcntl.ioctl" and args[1] in _CHANGING_IOCTLS:
            self._refuse(f"{event}: no attributes of files are changed")

    def _require_database(self, event: str, database: Any) -> None:
        if isinstance(database, str) and database.startswith("file:"):
            uri = urlsplit(database)
            if uri.path not in _IN_MEMORY and parse_qs(uri.query).get("mode") not in _READING:
                self._refuse(f"{event}: {database!r} would be changed")
        elif database not in _IN_MEMORY:
            self._require_free(event, database)

    def _require_free(self, event: str, path: Any) -> None:
        if isinstance(path, int):
            path = _path_of(path)
        if path is not None and not self._is_free(path):
            self._refuse(f"{event}: {os.fsdecode(path)!r} would be changed")

    def _refuse(self, what: str) -> NoReturn:
        self._note(what)
        raise Refused(13, f"`headway estimate` lets a script change nothing: {what}; {line_now()}")


def _joined(args: tuple[Any, ...], path: int, folder: int | None) -> Any:
    """Return the path among an event's arguments, below the folder that it is relative to."""
    fd = -1 if folder is None else args[folder]
    if isinstance(args[path], int) or not isinstance(fd, int) or fd < 0:
        return args[path]
    return os.path.join(_path_of(fd) or "", os.fsdecode(args[path]))


def _replace_default(owner: type, value: object, other: object) -> None:
    """Replace a default argument of the methods of a class: those of tempfile keep os.unlink."""
    for method in vars(owner).values():
        if defaults := getattr(method, "__defaults__", None):
            method.__defaults__ = tuple(other if one is value else one for one in defaults)


def _path_of(fd: int) -> str | None:
    """Return the path of an open file or folder; None for pipes and the like, or without /proc."""
    with suppress(OSError):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.startswith("/") and not path.startswith("/memfd:"):
            return path
    return None
