"""Saves a checkpoint on all ranks together: it is committed if every rank has written its part."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch

from headway._version import __version__
from headway.checkpoint.folders import (
    begin,
    commit,
    keep_unlisted,
    next_time,
    remove,
    require_space,
)
from headway.checkpoint.manifest import (
    FORMAT,
    File,
    Manifest,
    describe_files,
    files_below,
    write_manifest,
)
from headway.checkpoint.tensors import save_tensors
from headway.checkpoint.values import encode
from headway.collectives import (
    broadcast_object_list,
    gather_object,
)
from headway.errors import CheckpointError, HeadwayError
from headway.world import rank_and_size

T = TypeVar("T")
TENSORS = "tensors"  # the folder of torch.distributed.checkpoint
_OF_RANK = re.compile(r"tensors/__(\d+)_|values_rank(\d+)\.json$")
_ROOM = 2**20  # bytes for what is no tensor


class State(NamedTuple):
    """What a checkpoint holds; values and tensors in lists, tuples and dicts.

    Args:
        shared: the same on all ranks, or DTensors, of which each rank has a part.
        own: of this rank.
    """

    shared: Mapping[str, Any]
    own: Mapping[str, Any]


class Progress(NamedTuple):
    """Where training stands."""

    step: int  # optimizer steps done
    epoch: int


def values_name(rank: int | None = None) -> str:
    """Return the name of the file of shared values, or of those of one rank."""
    return "values.json" if rank is None else f"values_rank{rank}.json"


def prefix_of(rank: int | None = None) -> str:
    """Return what the names of tensors begin with: shared ones, or those of one rank."""
    return "shared" if rank is None else f"rank{rank}"


def save_checkpoint(
    target: Path,
    state: Callable[[Path], State],
    progress: Progress,
    *,
    sha256: bool = False,
) -> None:
    """Write a checkpoint and commit it; every rank calls this, and all return or raise together.

    Files in a folder at `target` that no checkpoint lists, such as those that a script wrote there,
    stay.

    Args:
        target: the folder that it becomes; an older checkpoint there is replaced in one step.
        state: called on every rank with the folder in which it may write further files, which
            become part of the checkpoint; returns what to save. Objects that are neither values nor
            tensors are refused.
        progress: for the manifest.
        sha256: keep SHA-256 checksums beside CRC-32.

    Raises:
        CheckpointError: a rank could not write; an older checkpoint at `target` still stands.
    """
    rank, _ = rank_and_size()
    pending = Path(on_rank_0(lambda: str(begin(target))))
    try:
        tensors: dict[str, torch.Tensor] = {}

        def encoded() -> tuple[Any, Any]:
            saved = state(pending)
            shared = encode(dict(saved.shared), prefix_of(), tensors)
            return shared, encode(dict(saved.own), prefix_of(rank), tensors)

        shared, own = agree(encoded)
        size = sum(gather_object([_bytes_to_write(tensors, rank)]))
        on_rank_0(lambda: require_space(pending, size))
        save_tensors(tensors, pending / TENSORS)

        def write() -> list[File]:
            if rank == 0:
                _write_json(pending / values_name(), shared)
            _write_json(pending / values_name(rank), own)
            return describe_files(pending, _files_of(rank, pending), sha256=sha256)

        files = gather_object(agree(write))
        on_rank_0(lambda: _commit(pending, target, progress, files))
    except BaseException:
        if rank == 0:
            remove(pending, target)
        raise


def _bytes_to_write(tensors: Mapping[str, torch.Tensor], rank: int) -> int:
    """Return the bytes of this rank's own tensors; on rank 0 those of the shared ones as well."""
    mine = [
        tensor
        for name, tensor in tensors.items()
        if rank == 0 or not name.startswith(f"{prefix_of()}.")
    ]
    return _ROOM + sum(tensor.numel() * tensor.element_size() for tensor in mine)


def _write_json(path: Path, value: Any) -> None:
    with open(path, "x", encoding="utf-8") as file:
        json.dump(value, file, allow_nan=False)


def _files_of(rank: int, folder: Path) -> list[str]:
    """Return the files that this rank describes: its own, and on rank 0 those of no rank."""
    files = []
    for path in sorted(files_below(folder)):
        match = _OF_RANK.match(path)
        if (int(match[1] or match[2]) if match else 0) == rank:
            files.append(path)
    return files


def _commit(pending: Path, target: Path, progress: Progress, files: list[File]) -> None:
    manifest = Manifest(
        format=FORMAT,
        headway=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        commit=_git_commit(),
        saved_at=next_time(target.parent),
        step=progress.step,
        epoch=progress.epoch,
        world_size=rank_and_size()[1],
        files=tuple(files),
    )
    write_manifest(pending, manifest)
    keep_unlisted(target, pending)
    commit(pending, target)


def _git_commit() -> str:
    """Return the commit of the script's git repository; empty outside of one, or without git."""
    script = getattr(sys.modules["__main__"], "__file__", None) or "."
    command = ["git", "-C", os.path.dirname(os.path.abspath(script)), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def agree(step: Callable[[], T]) -> T:
    """Call `step` on every rank, and return what it returned on this one.

    Raises:
        CheckpointError: it failed on a rank; raised on all of them, with the first one's cause.
    """
    result: T | None = None
    failed = None
    try:
        result = step()
    except Exception as error:  # noqa: BLE001  a hook of the script may raise anything
        failed = _told(error)
    for what, where, fix in filter(None, gather_object([failed])):
        raise CheckpointError(what, where=where, fix=fix)
    return result  # type: ignore[return-value]


def on_rank_0(step: Callable[[], T]) -> T:
    """Call `step` on rank 0, and return on every rank what it returned.

    Raises:
        CheckpointError: it failed; raised on all ranks.
    """
    result = agree(lambda: [step()] if rank_and_size()[0] == 0 else [None])
    return cast(T, broadcast_object_list(result)[0])


def _told(error: Exception) -> tuple[str, str, str]:
    """Return what, where and fix of an error, as it can be sent to other ranks."""
    if isinstance(error, HeadwayError):
        problem = error.problems[0]
        return problem.what, problem.where, problem.fix
    where = getattr(error, "filename", None)
    return (
        f"the checkpoint failed: {type(error).__name__}: {error}",
        f"rank {rank_and_size()[0]}" + (f", {where}" if where else ""),
        "older checkpoints still stand; fix the cause, and save again",
    )
