"""The checkpoints of a project, from which its next run goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from headway.checkpoint.folders import (
    FOLDER,
    leftovers_in,
    own_checkpoints_in,
    paths_in,
    recover,
    remove,
)
from headway.checkpoint.manifest import NAME, read_manifest, verify
from headway.errors import CheckpointError

_STEP = "step_"
_ABANDONED_AFTER_S = 600.0


class Candidate(NamedTuple):
    """A checkpoint that a run may go on from; its files have not been looked at."""

    saved_at: float  # seconds since the epoch
    path: Path


def step_folder(project: Path, step: int) -> Path:
    """Return where the checkpoint of an optimizer step is; the names sort by step."""
    return project / FOLDER / f"{_STEP}{step:08d}"


def keep_newest_steps(project: Path, keep: int) -> None:
    """Remove all but the newest `keep` of the checkpoints that `step_folder` has named."""
    named = [one for one in own_checkpoints_in(project / FOLDER) if _is_step(one.path.name)]
    for one in named[:-keep]:
        remove(one.path)


def saved_by_others(project: Path, since: float, own: Container[float]) -> Path | None:
    """Return a checkpoint that another run has saved while this one was running, if there is one.

    Args:
        since: when this run began to save.
        own: the times at which it has saved.
    """
    times = ((one.manifest.saved_at, one.path) for one in own_checkpoints_in(project / FOLDER))
    return next((path for at, path in times if at > since and at not in own), None)


def _is_step(name: str) -> bool:
    return name.startswith(_STEP) and name.removeprefix(_STEP).isdecimal()


def candidates(project: Path) -> list[Candidate]:
    """Return the checkpoints in a project's folder and in `checkpoints` below, the newest last.

    A folder there whose manifest is damaged is one, as old as the folder.
    """
    found: list[Candidate] = []
    for folder in (project, project / FOLDER):
        _finish_commits(folder)
        found += candidates_in(folder)
    return sorted(found, key=lambda one: (one.saved_at, one.path))


def meant_by(path: Path) -> Path:
    """Return the checkpoint at a path, or the newest of the project whose folder is there.

    The path of anything else is returned as it is: to read it says what is wrong.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    if os.path.lexists(path / NAME):
        return path
    found = candidates(path)
    return found[-1].path if found else path


def candidates_in(folder: Path) -> Iterator[Candidate]:
    """Yield the checkpoints in one folder, in any order."""
    for path in paths_in(folder):
        if path.name.startswith(".") or not _may_be_checkpoint(path):
            continue
        try:
            yield Candidate(read_manifest(path).saved_at, path)
        except CheckpointError:
            with suppress(FileNotFoundError):  # another process has removed it meanwhile
                yield Candidate(path.stat().st_mtime, path)


def _may_be_checkpoint(path: Path) -> bool:
    """Return whether a folder has a manifest, or the name of a checkpoint and is closed to us."""
    try:
        os.lstat(path / NAME)
    except PermissionError:
        return _is_step(path.name)
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
