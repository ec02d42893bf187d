"""Keeps a script from changing anything: what it writes goes to a scratch folder.

Files opened for writing, and folders made, are those of the same path below the scratch folder;
what was written is read from there. Removing and renaming what is outside is noted and not done. An
audit hook refuses what goes other ways, and programs and the network; the kernel refuses native
code (`landlock.py`).
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from headway.estimate.child.replacing import replace_wherever_imported
from headway.estimate.child.script_lines import line_now

Note = Callable[[str], None]

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    **dict.fromkeys(("os.remove", "os.rmdir", "shutil.rmtree"), ((0, 1),)),
    **dict.fromkeys(("os.rename", "os.link"), ((0, 2), (1, 3))),
    **dict.fromkeys(("os.mkdir", "os.chmod"), ((0, 2),)),
    **dict.fromkeys(("os.chown", "os.utime"), ((0, 3),)),
    **dict.fromkeys(("os.truncate", "os.setxattr", "os.removexattr", "os.chflags"), ((0, None),)),
    "os.symlink": ((1, 2),),
    "shutil.move": ((0, None), (1, None)),
}
"""Audit events of changes: which arguments are paths, and which the folders that these are in."""

_PROGRAMS = {
    *("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn"),
    *("os.spawn", "os.startfile", "pty.spawn", "os.kill", "os.killpg"),
}
_NETWORK = {
    *("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo"),
    *("socket.gethostbyname", "socket.gethostbyaddr", "urllib.Request"),
}
_DEVICES = ("/dev/null", "/dev/shm", "/dev/tty", "/dev/stdout", "/dev/stderr", "/dev/fd")


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
        return absolute == self._scratch or absolute.startswith((self._scratch + os.sep, *_DEVICES))

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
            if dir_fd is None:
                path = self._for_writing(path) if flags & _WRITING else self._seen(path)
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

        os.mkdir = mkdir
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
            *((os, name, 1) for name in ("truncate", "chmod", "chown", "utime")),
            (shutil, "rmtree", 1),
            (shutil, "move", 2),
        ):
            said = f"{module.__name__}.{name}"
            setattr(module, name, self._within(said, getattr(module, name), count))

    def _within(self, name: str, change: Callable[..., Any], count: int) -> Callable[..., Any]:
        """Return a function that changes only what lies below the scratch folder."""

        def changed(*args: Any, **kwargs: Any) -> Any:
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
        elif event in _PROGRAMS:
            self._refuse(f"{event}: no other programs are run")
        elif event in _NETWORK:
            self._refuse(f"{event}: there is no network")

    def _require_free(self, event: str, path: Any) -> None:
        if not isinstance(path, int) and not self._is_free(path):
            self._refuse(f"{event}: {os.fsdecode(path)!r} would be changed")

    def _refuse(self, what: str) -> None:
        self._note(what)
        raise Refused(13, f"`headway estimate` lets a script change nothing: {what}; {line_now()}")


def _joined(args: tuple[Any, ...], path: int, folder: int | None) -> Any:
    """Return the path among an event's arguments, below the folder that it is relative to."""
    fd = -1 if folder is None else args[folder]
    if isinstance(args[path], int) or not isinstance(fd, int) or fd < 0:
        return args[path]
    return os.path.join(os.readlink(f"/proc/self/fd/{fd}"), os.fsdecode(args[path]))
