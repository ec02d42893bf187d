"""What a folder has of checkpoints, with the state of each as far as it is seen without reading."""

from __future__ import annotations

import os
import stat
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from headway.checkpoint.folders import is_unfinished, leftovers_in
from headway.checkpoint.manifest import NAME, Manifest, is_below_link, read_manifest
from headway.checkpoint.project import candidates_in
from headway.errors import CheckpointError


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
    """Return the checkpoints in a folder, the newest last, and then what saves have left.

    Raises:
        CheckpointError: the folder cannot be read.
    """
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
