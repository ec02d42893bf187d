"""Checkpoint folders, which have a temporary name until they are complete.

A checkpoint is committed when its folder is renamed to the final name. Names that begin with a dot
are temporary: `.tmp-NAME-NONCE` is being written, `.trash-NONCE` is being removed, and
`.old-NAME-NONCE` is the previous checkpoint of the same name on a file system that cannot exchange
two folders. The checkpoints of a project are in its folder and in the subfolder `checkpoints`. A
run locks the project's `.headway-lock`, to detect other runs that save to the same project.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import platform
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from headway.checkpoint.manifest import (
    NAME,
    Manifest,
    fail,
    files_below,
    flush_to_disk,
    read_manifest,
    unlisted_files,
    verify,
)
from headway.errors import CheckpointError, Code
from headway.ipc.paths import is_absent
from headway.ipc.stderr import log, log_once, shown

FOLDER = "checkpoints"
"""Subfolder of a project for checkpoints that the script does not name."""

NUMBERED, STEP = "checkpoint_", "step_"
"""Prefixes of generated names, followed by a number. Step numbers have eight digits."""

_DIGITS = {NUMBERED: 1, STEP: 8}
LOCK = ".headway-lock"
_HOLDER = "process "
_LEFTOVER = re.compile(r"\.((tmp|old)-.+|trash)-[0-9a-f]{8}", re.DOTALL)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # renameat2(2)

COMPLETE, INCOMPLETE, UNREADABLE = "complete", "incomplete", "unreadable"
"""States of a checkpoint by its manifest and the sizes of its files, not by checksums."""


class Candidate(NamedTuple):
    """A committed checkpoint, whose files may be damaged, or what an interrupted save has left."""

    saved_at: float  # seconds since 1970; the folder's mtime if the manifest is unreadable
    path: Path
    manifest: Manifest | None = None  # None if unreadable

    @property
    def state(self) -> str:
        if _LEFTOVER.fullmatch(self.path.name):
            return INCOMPLETE
        if self.manifest is None:
            return UNREADABLE
        files = self.manifest.files
        try:
            is_complete = all(_is_file_of_size(self.path / file.path, file.size) for file in files)
        except OSError:
            return UNREADABLE
        return COMPLETE if is_complete else INCOMPLETE


# ---------------------------------------------------------------------- write


def create_pending(target: Path) -> Path:
    if target.name in ("", ".."):
        raise CheckpointError(
            "a checkpoint replaces its whole folder, so its path must end with a folder name",
            where=str(target),
            fix="pass the path of a subfolder",
            code=Code.BAD_ARGUMENT,
        )
    pending = _temporary_path(target, "tmp")
    fix = "save to a writable folder on a disk with free space"
    with _writing("the checkpoint cannot be written", pending, fix):
        target.parent.mkdir(parents=True, exist_ok=True)
        pending.mkdir(mode=0o700)
    return pending


@contextmanager
def _writing(what: str, where: Path, fix: str) -> Iterator[None]:
    """Convert an OSError inside the block to a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{what}: {error.strerror}", where=str(where), fix=fix, code=Code.UNWRITABLE
        ) from None


def require_shared(pending: Path) -> None:
    """Raise CheckpointError if this rank cannot see the folder created on rank 0."""
    with suppress(OSError):
        # makes a network file system query its server instead of its cache
        pending.parent.mkdir(parents=True, exist_ok=True)
    if not pending.is_dir():
        raise CheckpointError(
            "a rank cannot see the folder in which rank 0 writes the checkpoint",
            where=str(pending),
            fix="save to the same folder on all ranks, on a disk shared by all machines",
            code=Code.NOT_SHARED,
        )


def commit(pending: Path, target: Path) -> None:
    """Rename a complete folder created by `create_pending` to the checkpoint's name.

    An older checkpoint with this name is replaced atomically and then removed. If renaming fails,
    the older checkpoint remains.
    """
    what = "the checkpoint was written, but cannot be renamed"
    with _writing(what, target, "save to another folder"):
        for parent, _, _ in os.walk(pending, topdown=False, onerror=fail):
            flush_to_disk(Path(parent))
        mask = os.umask(0o077)
        os.umask(mask)
        pending.chmod(0o777 & ~mask)  # the permissions that a new folder would have
        _rename(pending, target)


def _rename(pending: Path, target: Path) -> None:
    """Rename `pending` to `target`, and remove an older checkpoint with this name.

    If the new name cannot be flushed to disk, the old state is restored.
    """
    old = None
    if is_absent(target):
        os.rename(pending, target)
    elif not target.is_dir() or target.is_symlink():
        raise OSError(0, "the target exists and is not a folder")
    elif exchange(pending, target):
        old = pending
    else:
        old = _temporary_path(target, "old")
        os.rename(target, old)
        try:
            os.rename(pending, target)
        except OSError:
            os.rename(old, target)
            raise
    try:
        flush_to_disk(target.parent)
    except OSError:
        with suppress(OSError):
            if old is pending:
                exchange(pending, target)
            else:
                os.rename(target, pending)
                if old is not None:
                    os.rename(old, target)
        raise
    if old is not None:
        remove(old)


def keep_unlisted(target: Path, pending: Path) -> None:
    """Link or copy to `pending` the files in `target` that its checkpoint does not list."""
    if not target.is_dir() or target.is_symlink():
        return
    try:
        manifest = read_manifest(target)
    except CheckpointError:
        manifest = None
    try:
        others = files_below(target) if manifest is None else unlisted_files(target, manifest)
        for path in others:
            kept = pending / path
            if is_absent(kept):
                kept.parent.mkdir(parents=True, exist_ok=True)
                _link_or_copy(target / path, kept)
    except OSError as error:
        raise CheckpointError(
            f"cannot preserve an existing file in the checkpoint's folder: {error.strerror}",
            where=str(error.filename or target),
            fix="save to another folder",
            code=Code.UNWRITABLE,
        ) from None


def _link_or_copy(source: Path, copy: Path) -> None:
    try:
        os.link(source, copy, follow_symlinks=False)
    except (OSError, NotImplementedError):  # unsupported by some file systems
        shutil.copy2(source, copy, follow_symlinks=False)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders atomically; return False if unsupported."""
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    paths = os.fsencode(one), os.fsencode(other)
    return bool(renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0)


def recover(target: Path) -> None:
    """If `target` is missing, finish a commit that was interrupted between its two renames.

    The newest complete folder is renamed to `target`.
    """
    if not is_absent(target) or not _siblings(target, "old"):
        return
    complete, problem = [], None
    for candidate in [*_siblings(target, "tmp"), *_siblings(target, "old")]:
        try:
            complete.append((verify(candidate).saved_at, candidate))
        except CheckpointError as error:
            problem = error.problems[0]
    if problem and not complete:  # of the checkpoint to be replaced
        fix = f"move {candidate} elsewhere to use earlier checkpoints, if any"
        raise CheckpointError(problem.what, where=problem.where, fix=fix, code=problem.code)
    what = "a save was interrupted after writing, and the checkpoint cannot be renamed"
    fix = f"run `headway checkpoint verify {target}` as a user with write permission"
    with _writing(what, target, fix):
        os.rename(max(complete)[1], target)
        flush_to_disk(target.parent)


# ---------------------------------------------------------------------- remove


def remove(path: Path) -> bool:
    """Remove a checkpoint or an unfinished folder; return whether the removal is complete.

    The folder is renamed first, so that a partly removed folder does not look like a checkpoint.
    """
    trash = path.with_name(f".trash-{os.urandom(4).hex()}")
    with suppress(OSError):  # removed by another process, or permission denied
        os.rename(path, trash)
        if trash.is_symlink() or not trash.is_dir():
            trash.unlink()
        else:
            shutil.rmtree(trash, ignore_errors=True)
    return is_absent(path) and is_absent(trash)


def prune(
    folder: Path,
    keep: int,
    start: str | None = None,
    times: Mapping[Path, float] = MappingProxyType({}),
) -> dict[Path, bool]:
    """Remove all but the newest `keep` checkpoints; return whether each removal is complete.

    With `start`, only checkpoints whose generated names have this prefix are considered. Symbolic
    links are neither counted nor removed. The manifests are read only if `times` lacks a folder.
    """
    named = {at for at in paths_in(folder) if start is None or _number(at.name, start) is not None}
    if len(named) <= keep:
        return {}
    if not named <= times.keys():
        times = {**{each.path: each.saved_at for each in checkpoints_in(folder)}, **times}
    own = [path for path in named & times.keys() if not path.is_symlink()]
    own.sort(key=lambda path: (times[path], path))
    return {path: remove(path) for path in own[: -max(keep, 1)]}


def leftovers_in(folder: Path) -> list[Path]:
    """Return the folders that interrupted saves have left in a folder, sorted."""
    return sorted(path for path in paths_in(folder) if _LEFTOVER.fullmatch(path.name))


# ---------------------------------------------------------------------- list


def named_folder(project: Path, start: str, number: int) -> Path:
    """Return the folder for a generated checkpoint name; names with steps sort by step number."""
    return project / FOLDER / _name(start, number)


def next_number(project: Path) -> int:
    """Return the next unused checkpoint number; numbers of damaged checkpoints count as used."""
    numbers = (_number(path.name, NUMBERED) for path in paths_in(project / FOLDER))
    return 1 + max((number for number in numbers if number is not None), default=-1)


def checkpoints_in(folder: Path) -> list[Candidate]:
    """Return the folder's committed checkpoints that have a readable manifest, newest last."""
    return [found for found in candidates_in(folder) if found.manifest is not None]


class SaveTimes:
    """The times of a process's saves, which increase even if the clock is set back.

    The manifests beside a checkpoint are read before the first save to its folder only.
    """

    def __init__(self) -> None:
        self._newest = 0.0
        self._seen: set[Path] = set()
        self.known: dict[Path, float] = {}  # of the checkpoints in folders of the `_seen`

    def next(self, target: Path) -> float:
        """Return the time for the checkpoint `target`, which is committed now."""
        folder = target.parent
        for place in {folder, folder.parent if folder.name == FOLDER else folder / FOLDER}:
            if place not in self._seen:
                self._seen.add(place)
                self.known |= {each.path: each.saved_at for each in checkpoints_in(place)}
                self._newest = max(self._newest, *self.known.values(), 0.0)
        self._newest = self.known[target] = max(time.time(), self._newest + 1e-3)
        return self._newest

    def prune(self, folder: Path, keep: int, start: str) -> None:
        """Remove checkpoints as the function `prune` does, without reading manifests again."""
        for path, is_complete in prune(folder, keep, start, self.known).items():
            if is_complete:
                self.known.pop(path, None)
            else:
                log_once(f"note: cannot remove the old checkpoint {shown(str(path))}")


def paths_in(folder: Path) -> list[Path]:
    """Return the paths in a folder; the list is empty if the folder does not exist."""
    try:
        return [folder / name for name in os.listdir(folder)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:  # such as a link to itself, or an invalid name
        raise CheckpointError(
            f"the folder cannot be read: {getattr(error, 'strerror', None) or error}",
            where=shown(str(folder)),
            fix="pass a readable folder or a new path",
            code=Code.UNREADABLE,
        ) from None


def _name(start: str, number: int) -> str:
    return f"{start}{number:0{_DIGITS[start]}d}"


def _number(name: str, start: str) -> int | None:
    """Return the number in a name generated by `_name`; None for any other name."""
    digits = name.removeprefix(start)
    is_own = digits.isdecimal() and digits.isascii() and name == _name(start, int(digits))
    return int(digits) if is_own else None


def candidates(project: Path) -> list[Candidate]:
    """Return the checkpoints in a project and in its subfolder `checkpoints`, newest last.

    Checkpoints with a damaged manifest are included; they are sorted by their folder's
    modification time.
    """
    folders = (project, project / FOLDER)
    for folder in folders:
        _finish_commits(folder)
    return sorted(candidate for folder in folders for candidate in candidates_in(folder))


def newest_in(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder, even if it is damaged; None if there is none."""
    _finish_commits(folder)
    return next((candidate.path for candidate in reversed(candidates_in(folder))), None)


def resolve_checkpoint(path: Path) -> Path:
    """Return the checkpoint at a path, or the newest checkpoint of the project at this path.

    Any other path is returned unchanged; reading it later raises an error.
    """
    found = candidates(path) if is_absent(path / NAME) else []
    return found[-1].path if found else path


def candidates_in(folder: Path) -> list[Candidate]:
    found = []
    for path in paths_in(folder):
        if path.name.startswith(".") or not _may_be_checkpoint(path):
            continue
        try:
            manifest = read_manifest(path)
            found.append(Candidate(manifest.saved_at, path, manifest))
        except CheckpointError:
            if not is_absent(path):  # otherwise another process has removed it
                found.append(Candidate(_mtime(path), path))
    return sorted(found)


def _mtime(path: Path) -> float:
    """Return a folder's modification time; infinity if it cannot be read."""
    try:
        return path.stat().st_mtime
    except OSError:
        return math.inf


def _may_be_checkpoint(path: Path) -> bool:
    """Return whether a folder has a manifest or, if the manifest is missing, a generated name."""
    has_own_name = any(_number(path.name, start) is not None for start in _DIGITS)
    return (has_own_name and os.path.isdir(path)) or not is_absent(path / NAME)


def _finish_commits(folder: Path) -> None:
    for left in leftovers_in(folder):
        if left.name.startswith(".old-"):
            recover(folder / left.name.removeprefix(".old-").rpartition("-")[0])


def newest_complete(found: list[Candidate]) -> tuple[Path | None, list[str]]:
    """Return the newest undamaged checkpoint, and the errors of all newer checkpoints."""
    errors = []
    for candidate in reversed(found):
        try:
            verify(candidate.path)
        except CheckpointError as error:
            errors.append(f"{error.problems[0].what} ({error.problems[0].where})")
        else:
            return candidate.path, errors
    return None, errors


# ---------------------------------------------------------------------- locking


def lock_project(project: Path) -> int | None:
    """Lock a project's checkpoints for this process; child processes do not inherit the lock.

    Return the descriptor of the locked file, which must stay open, or log once why it is None.
    Source: fcntl_locking(2). The lock also works between machines that share a disk over NFS.
    """
    import fcntl

    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd: int | None = None
    found = ""
    try:
        fd = os.open(project / LOCK, flags, 0o666)
        found = os.pread(fd, 200, 0).decode(errors="replace")
        if found and not found.startswith(_HOLDER):
            raise FileExistsError(errno.EEXIST, "the file belongs to another program")
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:  # nothing has been saved yet
        return None
    except OSError as error:
        if fd is not None:
            os.close(fd)
        if fd is not None and error.errno in (errno.EAGAIN, errno.EACCES):  # it is locked
            holder = shown(found) or "a process that is starting"
            log_once(
                f"note: another run also saves to {project} ({holder}), and each run removes the"
                " other's checkpoints; use a separate project_dir for each run"
            )
        elif os.access(project, os.W_OK):
            log_once(
                f"note: {project / LOCK} cannot be locked: {error.strerror}; another run that saves"
                " to this project and removes its checkpoints will not be detected"
            )
        return None
    with suppress(OSError):  # on a full disk, the previous contents remain
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{_HOLDER}{os.getpid()} of {platform.node()}".encode(), 0)
    return fd


def remove_leftovers(project: Path) -> None:
    """Remove the leftovers of interrupted saves; the project must be locked.

    If this fails, a note is logged and the run continues.
    """
    try:
        left = [path for path in leftovers_in(project / FOLDER) if not remove(path)]
    except CheckpointError as error:
        left = [Path(error.problems[0].where)]
    if left:
        log(f"note: cannot remove the leftovers of an interrupted save: {shown(str(left[0]))}")


def note_unwritable(project: Path) -> None:
    """Log a note if checkpoints cannot be saved in a project, before the first save fails."""
    nearest = next(filter(os.path.exists, (project / FOLDER, *(project / FOLDER).parents)))
    if not os.access(nearest, os.W_OK | os.X_OK):
        log(f"note: {shown(str(nearest))} is not writable, so checkpoints cannot be saved there")


def listed_in(folder: Path) -> list[Candidate]:
    left = [path for path in leftovers_in(folder) if not path.name.startswith(".trash-")]
    return [*candidates_in(folder), *(Candidate(0.0, path) for path in left)]


def _is_file_of_size(path: Path, size: int) -> bool:
    if is_absent(path):
        return False
    status = os.lstat(path)
    return stat.S_ISREG(status.st_mode) and status.st_size == size


# ---------------------------------------------------------------------- names, disks


def _temporary_path(target: Path, kind: str) -> Path:
    return target.with_name(f".{kind}-{target.name}-{os.urandom(4).hex()}")


def _siblings(target: Path, kind: str) -> list[Path]:
    start = f".{kind}-{target.name}"
    return [path for path in leftovers_in(target.parent) if path.name.rpartition("-")[0] == start]
