"""Saves a checkpoint on all ranks, and commits it once every rank has written its part."""

from __future__ import annotations

import platform
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from headway._version import __version__
from headway.checkpoint.folders import (
    SaveTimes,
    commit,
    create_pending,
    keep_unlisted,
    remove,
    require_shared,
)
from headway.checkpoint.manifest import (
    FORMAT,
    File,
    Manifest,
    describe_files,
    files_below,
    write_json,
    write_manifest,
)
from headway.checkpoint.tensors import fix_of, save_tensors
from headway.checkpoint.values import encode
from headway.distributed.call_barrier import call_barrier, script_location
from headway.distributed.world import rank_and_size
from headway.errors import CheckpointError, Code, HeadwayError
from headway.ipc.progress import process_progress
from headway.ipc.step_clock import SYNC

T = TypeVar("T")
TENSORS = "tensors"  # the folder that torch.distributed.checkpoint writes
_RANK_FILE = re.compile(r"tensors/__(\d+)_|values_rank(\d+)\.json$")


class Contents(NamedTuple):
    """The contents of a checkpoint: values and tensors in lists, tuples and dicts.

    `shared` is the same on all ranks, except that each rank holds only its shard of each DTensor.
    """

    shared: Mapping[str, Any]
    own: Mapping[str, Any]


class CheckpointProgress(NamedTuple):
    step: int  # optimizer steps done
    epoch: int
    launched_at: float = 0.0  # see `Manifest`


def values_name(rank: int | None = None) -> str:
    return "values.json" if rank is None else f"values_rank{rank}.json"


def prefix_of(rank: int | None = None) -> str:
    return "shared" if rank is None else f"rank{rank}"


class Prepared(NamedTuple):
    target: Path  # the final folder
    pending: Path  # the temporary folder
    shared: Any  # values of all ranks, as JSON
    own: Any  # values of this rank
    tensors: Mapping[str, torch.Tensor]  # written by this rank, by name
    progress: CheckpointProgress
    times: SaveTimes
    then: Callable[[], object]


def prepare_checkpoint(
    target: Path,
    state: Callable[[Path], Contents],
    progress: CheckpointProgress,
    times: SaveTimes,
    *,
    begin: Callable[[Path], object] = bool,
    then: Callable[[], object] = bool,
) -> Prepared:
    """Prepare a checkpoint that references the live tensors; every rank must call this.

    Files in `target` that are not part of a checkpoint, such as the script's own files, are kept.

    Every rank calls `begin` and then `state` with the temporary folder, to which they may add
    files. `begin` may communicate; `state` must not, because it may fail on some ranks only. Rank 0
    calls `then` once the checkpoint is complete.
    """
    rank, _ = rank_and_size()
    pending = target.with_name(on_rank_0(lambda: create_pending(target).name))
    tensors: dict[str, torch.Tensor] = {}

    def shared_target() -> Path:
        require_shared(pending)
        return target.absolute()  # a hook or the script may change the working directory

    def encoded() -> tuple[Any, Any]:
        saved = state(pending)
        shared = encode(dict(saved.shared), prefix_of(), tensors)
        return shared, encode(dict(saved.own), prefix_of(rank), tensors)

    with remove_on_failure(pending):
        target = agree(shared_target)
        pending = target.with_name(pending.name)
        begin(pending)
        shared, own = agree(encoded)
    written = {  # by rank 0 only, if all ranks share a plain tensor
        name: tensor
        for name, tensor in tensors.items()
        if rank == 0 or not name.startswith(f"{prefix_of()}.") or isinstance(tensor, DTensor)
    }
    return Prepared(target, pending, shared, own, written, progress, times, then)


def write_prepared(
    prepared: Prepared, group: dist.ProcessGroup | None = None, pause: Callable[[], object] = bool
) -> None:
    """Write and commit a checkpoint; a collective call, which raises on all ranks or on none.

    `group` is the process group to use; None is the default group. `pause` is called twice per
    tensor.
    """
    rank, size = rank_and_size()
    pending, tensors = prepared.pending, prepared.tensors
    with remove_on_failure(pending):
        checksums = save_tensors(tensors, pending / TENSORS, group, pause)
        known = {f"{TENSORS}/{name}": crc for name, crc in checksums.items()}

        def write() -> list[File]:
            if rank == 0:
                write_json(pending / values_name(), prepared.shared)
            write_json(pending / values_name(rank), prepared.own)
            return describe_files(pending, _files_of(rank, pending), known=known)

        files = [file for own in gather_results(write, group) for file in own]

        def complete() -> None:
            manifest = Manifest(
                format=FORMAT,
                headway=__version__,
                torch=torch.__version__,
                python=platform.python_version(),
                saved_at=prepared.times.next(prepared.target),
                **prepared.progress._asdict(),
                world_size=size,
                files=tuple(files),
            )
            write_manifest(pending, manifest)
            keep_unlisted(prepared.target, pending)
            commit(pending, prepared.target)

        on_rank_0(complete, group)
    on_rank_0(prepared.then, group)


@contextmanager
def remove_on_failure(pending: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if rank_and_size()[0] == 0:
            remove(pending)
        raise


def _files_of(rank: int, folder: Path) -> list[str]:
    """Return the files that this rank checksums: its own files and, on rank 0, shared files."""
    files = []
    for path in sorted(files_below(folder)):
        match = _RANK_FILE.match(path)
        if (int(match[1] or match[2]) if match else 0) == rank:
            files.append(path)
    return files


def agree(step: Callable[[], T]) -> T:
    """Call `step` on every rank, and return this rank's result; `step` must not call this function.

    If `step` fails on any rank, all ranks raise a CheckpointError with the first failure's cause.
    """
    result, problem = attempt(step)
    if call_barrier("a checkpoint", str(problem)) is not None or problem is not None:
        _raise_first(_gather(problem, None))
    return cast(T, result)


def gather_results(step: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Call `step` on every rank, and return all ranks' results; errors are as in `agree`."""
    results = _gather(attempt(step), group)
    _raise_first([problem for _, problem in results])
    return [cast(T, result) for result, _ in results]


def _raise_first(problems: list[dict[str, Any] | None]) -> None:
    for problem in filter(None, problems):
        raise CheckpointError(**problem, is_of_all_ranks=True)


def on_rank_0(step: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call `step` on rank 0, and return its result or raise its error on every rank."""
    rank, size = rank_and_size()
    sent = [attempt(step) if rank == 0 else (None, None)]
    if size > 1:
        with process_progress().clock.counting(SYNC) if group is None else nullcontext():
            dist.broadcast_object_list(sent, src=0, group=group)
    result, problem = sent[0]
    if problem is not None:
        raise CheckpointError(**problem, is_of_all_ranks=True)
    return cast(T, result)


def attempt(step: Callable[[], T]) -> tuple[T | None, dict[str, Any] | None]:
    """Return the result of `step`, or the arguments of the CheckpointError for its error."""
    try:
        return step(), None
    except HeadwayError as error:
        problem = error.problems[0]._asdict()
        return None, {name: problem[name] for name in ("what", "where", "fix", "code")}
    except Exception as error:  # noqa: BLE001  a hook of the script may raise anything
        where, rank = getattr(error, "filename", None), f"rank {rank_and_size()[0]}"
        where = where or script_location([*traceback.walk_tb(error.__traceback__)][-1][0])
        cause = f"{type(error).__name__}: {error}"
        fix = "correct the code that raises it; older checkpoints are intact"
        if isinstance(error, OSError):
            cause, fix = str(error.strerror), fix_of(error)
        what, where = f"the checkpoint failed: {cause}", f"{rank}, {where}" if where else rank
        return None, {"what": what, "where": where, "fix": fix, "code": Code.UNWRITABLE}


def _gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    values: list[Any] = [value] * rank_and_size()[1]
    if len(values) > 1:
        # a group is passed by the writing thread
        with process_progress().clock.counting(SYNC) if group is None else nullcontext():
            dist.all_gather_object(values, value, group=group)
    return values
