"""The checkpoints of transformers' and Lightning's Trainer, and which are complete; no torch."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import NamedTuple

RECORD = "_headway-training.json"  # of what trains into a folder; `_`: Trainer uploads none
STATE = "trainer_state.json"
"""What transformers' Trainer writes last."""
WEIGHTS_ALONE = "it has no state of the optimizer: it was saved with save_only_model"
_BEING_WRITTEN = "checkpoint-is-incomplete.txt"  # of Trainer's own saves on SIGTERM
_NAME = re.compile(r"checkpoint-(\d+)$")
_OPTIMIZERS = ("optimizer.*", "optimizer_*", "global_step*")  # the last two of FSDP, DeepSpeed
_SCHEDULES, _GENERATORS = ("scheduler.pt", "global_step*"), "rng_state*.pth"
LIGHTNING = ".ckpt"
_LIGHTNING_PLACES = ("*", "checkpoints/*", "*/checkpoints/*", "*/*/checkpoints/*")


class Saved(NamedTuple):
    """A checkpoint that may be complete."""

    path: Path  # of its folder, or its file
    at: float  # when it was saved, by the clock of its disk
    step: int = 0  # of transformers' Trainer; 0: unknown


def is_of_library(path: Path) -> bool:
    """Return whether a path is a checkpoint of a library, or a folder that has some."""
    try:
        has_record = (path / RECORD).exists()
        return has_record or bool(trainer_checkpoints(path) or lightning_checkpoints(path))
    except OSError:  # of another user, say
        return False


def trainer_checkpoints(folder: Path) -> list[Saved]:
    """Return the checkpoint at a path, or those in a folder of transformers' Trainer."""
    if (folder / STATE).exists() or _NAME.match(folder.name):
        return [_saved(folder)] if folder.is_dir() else []
    return [_saved(path) for path in folder.glob("checkpoint-*") if _NAME.match(path.name)]


def _saved(folder: Path) -> Saved:
    state, named = folder / STATE, _NAME.match(folder.name)
    return Saved(folder, _time_of(state) or _time_of(folder), int(named[1]) if named else 0)


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # it is not there, or no more
        return 0.0


def trainer_fault(folder: Path) -> str | None:
    """Return why training does not go on from a folder of transformers' Trainer."""
    try:
        if (folder / _BEING_WRITTEN).exists():
            return "it was being written"
        if not (folder / STATE).exists():
            return f"{STATE}, which is written last, is missing"
        for file in folder.rglob("*"):
            if _is_cut_off(file):
                return f"{file.relative_to(folder)} is cut off"
    except OSError as error:  # such as of a folder that is removed meanwhile
        return f"{error.filename} cannot be read: {error.strerror}"
    if not any(any(folder.glob(kind)) for kind in _OPTIMIZERS):
        return WEIGHTS_ALONE
    if not any(any(folder.glob(kind)) for kind in _SCHEDULES):
        return "scheduler.pt is missing, without which the optimizer begins anew"
    return None if any(folder.glob(_GENERATORS)) else f"{_GENERATORS} is missing"


def _is_cut_off(file: Path) -> bool:
    """Return whether the end of a file is missing, as far as its format shows."""
    if file.suffix == ".safetensors":
        return file.stat().st_size != _size_by_header(file)
    if file.suffix in (".pt", ".pth"):
        with open(file, "rb") as opened:
            start = opened.read(2)
        return not start or (start == b"PK" and not zipfile.is_zipfile(file))
    return file.name == STATE and not _is_json(file)


def _size_by_header(file: Path) -> int:
    """Return how large a file of safetensors is, by what its header lists; -1 without one."""
    try:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, file.stat().st_size)))
        ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
        return int(8 + length + max(ends, default=0))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return -1


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


def lightning_checkpoints(path: Path) -> list[Saved]:
    """Return the checkpoint of Lightning at a path, or those where its Trainer and loggers save."""
    if path.suffix == LIGHTNING:
        return [Saved(path, _time_of(path))] if path.exists() else []
    found = [one for place in _LIGHTNING_PLACES for one in path.glob(place + LIGHTNING)]
    return [Saved(one, _time_of(one)) for one in found if not one.is_symlink()]


def lightning_fault(path: Path) -> str | None:
    """Return why a checkpoint of Lightning is not complete: a file, or a folder of shards."""
    if path.is_dir():
        return None if any(path.rglob(".metadata")) else "its table of tensors is missing"
    return None if zipfile.is_zipfile(path) else "its end is missing"
