"""The folders of checkpoints: a private one is written, and takes its place in one step.

A checkpoint is there once the folder has its name, and never before. Names that begin with a dot
are those of this file: `.tmp-NAME-NONCE` is being written, `.old-NAME-NONCE` is an older checkpoint
of the same name on a file system that cannot exchange two folders, `.trash-NONCE` is being removed.
A project has checkpoints in its folder, and in `checkpoints` below it; one run at a time saves to
it, the one that has locked `.headway-lock` in its folder.
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
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from headway.checkpoint.manifest import (
    NAME,
    Manifest,
    fail,
    files_below,
    read_manifest,
    unlisted_files,
    verify,
)
from headway.errors import CheckpointError
from headway.ipc.paths import is_absent
from headway.ipc.stderr import log, shown

FOLDER = "checkpoints"
"""Below a project's folder, for checkpoints that the script does not name."""

NUMBERED, STEP = "checkpoint_", "step_"
"""Begin the names that Headway gives: a number follows, of a step with eight digits."""

_DIGITS = {NUMBERED: 1, STEP: 8}
LOCK = ".headway-lock"
_HOLDER = "process "
_LEFT = re.compile(r"\.((tmp|old)-.+|trash)-[0-9a-f]{8}", re.DOTALL)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # renameat2(2)


class Checkpoint(NamedTuple):
    """A committed checkpoint; its files are not checked."""

    path: Path
    manifest: Manifest


class Candidate(NamedTuple):
    """A checkpoint that a run may resume from; its files are not checked."""

    saved_at: float  # seconds since the epoch; of the folder, where the manifest cannot be read
    path: Path
    manifest: Manifest | None = None  # None: it cannot be read


# ---------------------------------------------------------------------- write


def begin(target: Path) -> Path:
    if target.name in ("", ".."):
        raise CheckpointError(
            "a checkpoint takes the place of its folder, and this one has no name",
            where=str(target),
            fix="pass the path of a folder below it",
        )
    pending = _beside(target, "tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        pending.mkdir(mode=0o700)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint cannot be written: {error.strerror}",
            where=str(pending),
            fix="save to a folder that you may write, on a disk that has space",
        ) from None
    return pending


def require_shared(pending: Path) -> None:
    """Require that this rank sees the folder that `begin` made on rank 0."""
    with suppress(OSError):
        # so that a network file system asks its server, and does not remember that it was missing
        pending.parent.mkdir(parents=True, exist_ok=True)
    if not pending.is_dir():
        raise CheckpointError(
            "a rank does not see the folder in which rank 0 writes the checkpoint",
            where=str(pending),
            fix="let all ranks save to the same folder, on a disk that all machines share",
        )


def commit(pending: Path, target: Path) -> None:
    """Rename a folder of `begin`, with its manifest, to the checkpoint's name.

    An older checkpoint of this name is replaced in the same step, and removed. If the system
    refuses, it remains.
    """
    try:
        for parent, _, _ in os.walk(pending, topdown=False, onerror=fail):
            _flush(Path(parent))
        pending.chmod(0o777 & ~_umask())  # as new folders
        _give_name(pending, target)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint was written, but cannot take its place: {error.strerror}",
            where=str(target),
            fix="save to another folder",
        ) from None


def _give_name(pending: Path, target: Path) -> None:
    """Rename `pending` to `target`, and remove the checkpoint that had this name.

    If the new name cannot be flushed to disk, the old state is restored.
    """
    old = None
    if is_absent(target):
        os.rename(pending, target)
    elif not target.is_dir() or target.is_symlink():
        raise OSError(0, "what has this name is not a folder")
    elif exchange(pending, target):
        old = pending
    else:
        old = _beside(target, "old")
        os.rename(target, old)
        try:
            os.rename(pending, target)
        except OSError:
            os.rename(old, target)
            raise
    try:
        _flush(target.parent)
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
    """Give `pending` the files below `target` that are not part of the checkpoint there."""
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
            f"a file in the folder of the checkpoint cannot be kept: {error.strerror}",
            where=str(error.filename or target),
            fix="save to another folder",
        ) from None


def _link_or_copy(source: Path, copy: Path) -> None:
    try:
        os.link(source, copy, follow_symlinks=False)
    except (OSError, NotImplementedError):  # not on every file system
        shutil.copy2(source, copy, follow_symlinks=False)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders atomically; return False if the system cannot."""
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    paths = os.fsencode(one), os.fsencode(other)
    return bool(renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0)


def recover(target: Path) -> None:
    """Finish a commit that stopped between its two renames, if `target` is missing.

    The newest whole folder of the two takes the name.
    """
    if not is_absent(target) or not _siblings(target, "old"):
        return
    whole, problem = [], None
    for candidate in [*_siblings(target, "tmp"), *_siblings(target, "old")]:
        try:
            whole.append((verify(candidate).saved_at, candidate))
        except CheckpointError as error:
            problem = error.problems[0]
    if problem and not whole:  # that of the checkpoint that was to be replaced
        fix = f"move {candidate} away to use the checkpoints before it, if any"
        raise CheckpointError(problem.what, where=problem.where, fix=fix)
    try:
        os.rename(max(whole)[1], target)
        _flush(target.parent)
    except OSError as error:
        raise CheckpointError(
            "a save was cut off when all was written, and the checkpoint cannot be given its name:"
            f" {error.strerror}",
            where=str(target),
            fix=f"let a user who may write there run `headway checkpoint verify {target}`",
        ) from None


# ---------------------------------------------------------------------- remove


def remove(path: Path) -> bool:
    """Remove a checkpoint or a leftover; return whether it is gone completely.

    It is renamed first, so that no part of it can be taken for a whole checkpoint.
    """
    trash = path.with_name(f".trash-{os.urandom(4).hex()}")
    with suppress(OSError):  # another process was faster, or may not
        os.rename(path, trash)
        if trash.is_symlink() or not trash.is_dir():
            trash.unlink()
        else:
            shutil.rmtree(trash, ignore_errors=True)
    return is_absent(path) and is_absent(trash)


def prune(folder: Path, keep: int, start: str | None = None) -> dict[Path, bool]:
    """Remove all but the newest `keep` checkpoints; return whether each is gone completely.

    With `start`, only names that Headway has made with it count. A link is not a checkpoint: it is
    neither counted nor removed.
    """
    paths = [checkpoint.path for checkpoint in own_checkpoints_in(folder)]
    own = [path for path in paths if start is None or _number(path.name, start) is not None]
    return {path: remove(path) for path in own[: -max(keep, 1)]}


def leftovers_in(folder: Path) -> list[Path]:
    """Return what interrupted saves have left in a folder, sorted."""
    return sorted(path for path in paths_in(folder) if _LEFT.fullmatch(path.name))


# ---------------------------------------------------------------------- look


def named_folder(project: Path, start: str, number: int) -> Path:
    """Return the folder for a checkpoint that Headway names; those of steps sort by their names."""
    return project / FOLDER / _name(start, number)


def next_number(project: Path) -> int:
    """Return the number after all used ones, including those of damaged checkpoints."""
    numbers = (_number(path.name, NUMBERED) for path in paths_in(project / FOLDER))
    return 1 + max((number for number in numbers if number is not None), default=-1)


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """Return the committed checkpoints in a folder, the newest last; not damaged ones."""
    found = candidates_in(folder)
    return [Checkpoint(item.path, item.manifest) for item in found if item.manifest is not None]


def own_checkpoints_in(folder: Path) -> list[Checkpoint]:
    """Return the committed checkpoints in a folder, without links."""
    return [checkpoint for checkpoint in checkpoints_in(folder) if not checkpoint.path.is_symlink()]


def next_time(folder: Path) -> float:
    """Return now, or a time after all manifests of the project: clocks may be set back."""
    beside = (folder, folder / FOLDER) if folder.name != FOLDER else (folder, folder.parent)
    found = [item.manifest.saved_at for place in beside for item in checkpoints_in(place)]
    return max(time.time(), max(found, default=0.0) + 1e-3)


def paths_in(folder: Path) -> list[Path]:
    """Return the contents of a folder; empty if it is not one."""
    try:
        return [folder / name for name in os.listdir(folder)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:  # a link to itself; no name of a file
        raise CheckpointError(
            f"the folder cannot be read: {getattr(error, 'strerror', None) or error}",
            where=shown(str(folder)),
            fix="pass a folder that you may read, or the path of a new one",
        ) from None


def _name(start: str, number: int) -> str:
    return f"{start}{number:0{_DIGITS[start]}d}"


def _number(name: str, start: str) -> int | None:
    """Return the number in a name that `_name` gives; None for any other name."""
    digits = name.removeprefix(start)
    is_own = digits.isdecimal() and digits.isascii() and name == _name(start, int(digits))
    return int(digits) if is_own else None


def candidates(project: Path) -> list[Candidate]:
    """Return the checkpoints in a project's folder and in `checkpoints` below, the newest last.

    A folder there whose manifest is damaged counts, with the folder's time.
    """
    folders = (project, project / FOLDER)
    for folder in folders:
        _finish_commits(folder)
    return sorted(candidate for folder in folders for candidate in candidates_in(folder))


def newest_in(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder, maybe a damaged one; None if it has none."""
    _finish_commits(folder)
    return next((candidate.path for candidate in reversed(candidates_in(folder))), None)


def resolve_checkpoint(path: Path) -> Path:
    """Return the checkpoint at a path, or the newest of the project at this path.

    Any other path is returned unchanged: reading it raises the error.
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
            if not is_absent(path):  # else it has been removed meanwhile
                found.append(Candidate(_time_of(path), path))
    return sorted(found)


def _time_of(path: Path) -> float:
    """Return when a folder was changed; if that cannot be read, later than any other."""
    try:
        return path.stat().st_mtime
    except OSError:
        return math.inf


def _may_be_checkpoint(path: Path) -> bool:
    """Return whether a folder has a manifest, or a name that Headway gives: it is damaged then."""
    has_own_name = any(_number(path.name, start) is not None for start in _DIGITS)
    return (has_own_name and os.path.isdir(path)) or not is_absent(path / NAME)


def _finish_commits(folder: Path) -> None:
    for left in leftovers_in(folder):
        if left.name.startswith(".old-"):
            recover(folder / left.name.removeprefix(".old-").rpartition("-")[0])


def newest_complete(found: list[Candidate]) -> tuple[Path | None, list[CheckpointError]]:
    """Return the newest undamaged checkpoint, and the errors of those after it."""
    faults = []
    for candidate in reversed(found):
        try:
            verify(candidate.path)
        except CheckpointError as error:
            faults.append(error)
        else:
            return candidate.path, faults
    return None, faults


# ---------------------------------------------------------------------- one run at a time


class Claim(NamedTuple):
    """A project's checkpoints are this run's until its process ends, or another run's."""

    fd: int | None  # of the locked file, which stays open; None: this run does not have them
    holder: str = ""  # the process of another run that has them
    problem: str = ""  # why it is not known whether another run has them


def claim(project: Path) -> Claim:
    """Lock a project's checkpoints for this process; its children do not keep the lock.

    Source: fcntl_locking(2). It holds on all machines that share a disk by NFS.
    """
    import fcntl

    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(project / LOCK, flags, 0o666)
    except FileNotFoundError:  # nothing has been saved yet
        return Claim(None)
    except OSError as error:
        may_save = os.access(project, os.W_OK)
        return Claim(None, problem=os.strerror(error.errno or 0) if may_save else "")
    try:
        found = os.pread(fd, 200, 0).decode(errors="replace")
        if found and not found.startswith(_HOLDER):
            raise FileExistsError(errno.EEXIST, "it is another program's file")
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EAGAIN, errno.EACCES):  # it is locked
            return Claim(None, shown(found) or "a process that is starting")
        return Claim(None, problem=str(error.strerror))
    with suppress(OSError):  # a full disk: what is there is shown
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{_HOLDER}{os.getpid()} of {platform.node()}".encode(), 0)
    return Claim(fd)


def remove_leftovers(project: Path) -> None:
    """Remove what interrupted saves have left, once the project is claimed.

    What cannot be removed is reported: no run fails for it.
    """
    try:
        left = [path for path in leftovers_in(project / FOLDER) if not remove(path)]
    except CheckpointError as error:
        left = [Path(error.problems[0].where)]
    if left:
        log(f"note: what an interrupted save has left cannot be removed: {shown(str(left[0]))}")


class SaveStatus(str, Enum):
    """A checkpoint's state by its manifest and the sizes of its files, not by their bytes.

    INCOMPLETE: files are missing or have other sizes, or its save has not finished. UNREADABLE:
    its manifest or a file cannot be read; verifying the checkpoint gives the reason.
    """

    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    UNREADABLE = "unreadable"


class ListedCheckpoint(NamedTuple):
    """A checkpoint, or what an interrupted save has left of one."""

    path: Path
    state: SaveStatus
    manifest: Manifest | None  # None: there is none that can be read


def listed_in(folder: Path) -> list[ListedCheckpoint]:
    left = [path for path in leftovers_in(folder) if not path.name.startswith(".trash-")]
    return [
        *(_inspect(candidate.path) for candidate in candidates_in(folder)),
        *(ListedCheckpoint(path, SaveStatus.INCOMPLETE, None) for path in left),
    ]


def _inspect(path: Path) -> ListedCheckpoint:
    try:
        manifest = read_manifest(path)
        is_whole = all(_has_size(path / file.path, file.size) for file in manifest.files)
    except (CheckpointError, OSError):
        return ListedCheckpoint(path, SaveStatus.UNREADABLE, None)
    status = SaveStatus.COMPLETE if is_whole else SaveStatus.INCOMPLETE
    return ListedCheckpoint(path, status, manifest)


def _has_size(path: Path, size: int) -> bool:
    if is_absent(path):
        return False
    status = os.lstat(path)
    return stat.S_ISREG(status.st_mode) and status.st_size == size


# ---------------------------------------------------------------------- names, disks


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{kind}-{target.name}-{os.urandom(4).hex()}")


def _siblings(target: Path, kind: str) -> list[Path]:
    start = f".{kind}-{target.name}"
    return [path for path in leftovers_in(target.parent) if path.name.rpartition("-")[0] == start]


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
