"""The list of checkpoints that libraries have completed, in the folder of their output. No torch.

A library's checkpoint counts once it is listed: all ranks have written it then.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from headway.contract.notes import say
from headway.contract.typed import parse, plain, read
from headway.errors import CheckpointError

LIST = "_headway-checkpoints.json"  # `_`: Trainer's push_to_hub uploads no such file
STATE = "trainer_state.json"
"""What transformers' Trainer writes last."""
LIGHTNING = ".ckpt"


class Listed(NamedTuple):
    """A checkpoint, or the training that will save it."""

    path: str = ""
    launched_at: float = 0.0  # when the launch that trains began, in seconds since the epoch
    job: str = ""  # of the scheduler; empty outside of one
    number: int = 1  # of the script's trainings in this folder


class Checkpoints(NamedTuple):
    """The contents of the file; the newest is the last."""

    checkpoints: tuple[Listed, ...] = ()


def is_of_library(path: Path) -> bool:
    """Return whether a path is a checkpoint of a library, or a folder with a list of some."""
    try:
        is_listed = any((path / name).exists() for name in (LIST, STATE))
    except OSError:  # of another user, say
        return False
    return is_listed or path.suffix == LIGHTNING


def read_list(folder: Path) -> list[Listed]:
    """Return the checkpoints listed in a folder that still exist, the newest last.

    Raises:
        CheckpointError: the list cannot be read.
    """
    try:
        text = (folder / LIST).read_text(encoding="utf-8")
        listed = read(Checkpoints, parse(text)).checkpoints
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the list of checkpoints cannot be read: {error}",
            where=str(folder / LIST),
            fix="remove it, and pass the checkpoint to resume from: --resume FOLDER",
        ) from None
    found = (one._replace(path=os.path.join(folder, one.path)) for one in listed)
    return [one for one in found if os.path.exists(one.path)]


def add_to_list(folder: Path, checkpoint: Listed) -> None:
    """List a checkpoint that is complete, after the others; where that fails, only print it.

    The file changes all at once.
    """
    own = os.path.realpath(checkpoint.path)
    others = [one for one in read_list(folder) if os.path.realpath(one.path) != own]
    within = [one._replace(path=os.path.relpath(one.path, folder)) for one in (*others, checkpoint)]
    pending = folder / f"{LIST}.pending"
    try:
        with open(pending, "w", encoding="utf-8") as file:
            json.dump(plain(Checkpoints(tuple(within))), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        pending.replace(folder / LIST)
    except OSError as error:
        what = f"{checkpoint.path} cannot be listed in {folder}: {error.strerror}"
        say(f"note: {what}; name it to resume")
