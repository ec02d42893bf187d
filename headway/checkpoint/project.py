"""The checkpoints of a project, from which its next run goes on; what a folder has of them."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from headway.checkpoint.folders import (
    FOLDER,
    is_unfinished,
    leftovers_in,
    own_checkpoints_in,
    paths_in,
    recover,
    remove,
)
from headway.checkpoint.manifest import NAME, Manifest, is_below_link, read_manifest, verify
from headway.errors import CheckpointError

_NUMBERED, _STEP = "checkpoint_", "step_"
_ABANDONED_AFTER_S = 600.0


class Candidate(NamedTuple):
    """A checkpoint that a run may go on from; its files have not been looked at."""

    saved_at: float  # seconds since the epoch
    path: Path
    launched_at: float | None = None  # as in its manifest; None: that cannot be read


def step_folder(project: Path, step: int) -> Path:
    """Return where the checkpoint of an optimizer step is; the names sort by step."""
    return project / FOLDER / f"{_STEP}{step:08d}"


def numbered_folder(project: Path, number: int) -> Path:
    """Return where the checkpoint of this number is, with automatic naming."""
    return project / FOLDER / f"{_NUMBERED}{number}"


def next_number(project: Path) -> int:
    """Return the number after those that `numbered_folder` has used, for damaged ones as well."""
    numbers = (_number(path.name, _NUMBERED) for path in paths_in(project / FOLDER))
    return 1 + max((one for one in numbers if one is not None), default=-1)


def keep_newest_steps(project: Path, keep: int) -> None:
    """Remove all but the newest `keep` of the checkpoints that `step_folder` has named."""
    found = own_checkpoints_in(project / FOLDER)
    named = [one.path for one in found if _number(one.path.name, _STEP) is not None]
    for path in named[:-keep]:
        remove(path)


def saves_in(project: Path) -> dict[float, Path]:
    """Return this user's checkpoints of a project by the times in their manifests.

    No two saves have the same time, so it tells whose a checkpoint is; clocks may be set back.
    """
    return {one.manifest.saved_at: one.path for one in own_checkpoints_in(project / FOLDER)}


def _number(name: str, start: str) -> int | None:
    """Return the number in a name that begins like this; None if that is not what it is."""
    digits = name.removeprefix(start)
    return int(digits) if name.startswith(start) and digits.isdecimal() else None


def candidates(project: Path) -> list[Candidate]:
    """Return the checkpoints in a project's folder and in `checkpoints` below, the newest last.

    A folder there whose manifest is damaged is one, as old as the folder.
    """
    folders = (project, project / FOLDER)
    for folder in folders:
        _finish_commits(folder)
    return _sorted(one for folder in folders for one in _look_into(folder))


def newest_in(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder, which may be damaged; None if it has none."""
    _finish_commits(folder)
    found = candidates_in(folder)
    return found[-1].path if found else None


def resolve_checkpoint(path: Path) -> Path:
    """Return the checkpoint at a path, or the newest of the project whose folder is there.

    The path of anything else is returned as it is: to read it says what is wrong.
    """
    if os.path.lexists(path / NAME):
        return path
    found = candidates(path)
    return found[-1].path if found else path


def candidates_in(folder: Path) -> list[Candidate]:
    """Return the checkpoints in one folder, the newest last, as it is at the moment."""
    return _sorted(_look_into(folder))


def _sorted(found: Iterable[Candidate]) -> list[Candidate]:
    return sorted(found, key=lambda one: (one.saved_at, one.path))


def _look_into(folder: Path) -> list[Candidate]:
    while True:
        paths = [one for one in paths_in(folder) if not one.name.startswith(".")]
        found = [*_candidates_of(paths)]
        if not any(map(_is_gone, paths)):
            return found
        # a process that has removed one meanwhile may have saved another before


def _is_gone(path: Path) -> bool:
    try:
        os.lstat(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _candidates_of(paths: Iterable[Path]) -> Iterator[Candidate]:
    for path in filter(_may_be_checkpoint, paths):
        try:
            manifest = read_manifest(path)
            yield Candidate(manifest.saved_at, path, manifest.launched_at)
        except CheckpointError:
            with suppress(FileNotFoundError):  # it has been removed meanwhile
                yield Candidate(path.stat().st_mtime, path)


def _may_be_checkpoint(path: Path) -> bool:
    """Return whether a folder has a manifest, or a name that Headway gives and is closed to us."""
    try:
        os.lstat(path / NAME)
    except PermissionError:
        return any(_number(path.name, start) is not None for start in (_STEP, _NUMBERED))
    except OSError:
        return False
    return True


def _finish_commits(folder: Path) -> None:
    for left in leftovers_in(folder):
        if left.name.startswith(".old-"):
            recover(folder / left.name.removeprefix(".old-").rpartition("-")[0])


def newest_whole(found: list[Candidate]) -> tuple[Path | None, list[CheckpointError]]:
    """Return the newest of these that is not damaged, and what is wrong with those after it."""
    faults = []
    for one in reversed(found):
        try:
            verify(one.path)
        except CheckpointError as error:
            faults.append(error)
        else:
            return one.path, faults
    return None, faults


def remove_abandoned(project: Path) -> None:
    """Remove what saves that did not end have left, if nothing has been written there for long."""
    for left in leftovers_in(project / FOLDER):
        with suppress(OSError):
            written_at = max(one.stat().st_mtime for one in (left, *left.rglob("*")))
            if time.time() - written_at > _ABANDONED_AFTER_S:
                remove(left, left.with_name(left.name.split("-", 1)[1]))


class State(str, Enum):
    """How a checkpoint looks from its manifest, and the sizes of its files; their bytes may differ.

    INCOMPLETE: files are missing, or its save has not ended. CLOSED: this user may not read its
    manifest, or look into its folders. DAMAGED: its manifest is none, or a file has another size.
    """

    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    CLOSED = "closed"
    DAMAGED = "damaged"


class Listed(NamedTuple):
    """A checkpoint, or what a save has left of one."""

    path: Path
    state: State
    manifest: Manifest | None  # None: there is none that can be read


def listed_in(folder: Path) -> list[Listed]:
    """Return the checkpoints in a folder, the newest last, and then what saves have left."""
    left = [path for path in leftovers_in(folder) if is_unfinished(path)]
    return [
        *(_look_at(one.path) for one in candidates_in(folder)),
        *(Listed(path, State.INCOMPLETE, None) for path in left),
    ]


def _look_at(path: Path) -> Listed:
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return Listed(path, State.CLOSED if _is_closed(path / NAME) else State.DAMAGED, None)
    states = {
        State.DAMAGED if is_below_link(path, file.path) else _state_of(path / file.path, file.size)
        for file in manifest.files
    }
    worst = next((one for one in reversed(State) if one in states), State.COMPLETE)
    return Listed(path, worst, manifest)


def _is_closed(path: Path) -> bool:
    """Return whether there is a file that this user may not read, as far as permissions show."""
    try:
        os.lstat(path)
    except PermissionError:
        return True
    except OSError:
        return False
    return not os.access(path, os.R_OK, follow_symlinks=False)


def _state_of(path: Path, size: int) -> State:
    """Return the state of one file that is to have so many bytes."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return State.INCOMPLETE
    except PermissionError:
        return State.CLOSED
    except OSError:
        return State.DAMAGED
    is_right = stat.S_ISREG(status.st_mode) and status.st_size == size
    return State.COMPLETE if is_right else State.DAMAGED
