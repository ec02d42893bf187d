"""The tensors of a checkpoint, by torch.distributed.checkpoint: the same for any number of ranks.

Nothing that could run code is read; see `index.py`.
"""

from __future__ import annotations

import io
import math
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from headway.checkpoint.index import read_index
from headway.checkpoint.manifest import take_another
from headway.distributed.world import rank_and_size
from headway.errors import CheckpointError

_Box = list[tuple[int, int]]

_INDEX = ".metadata"
_BUFFER = 2**20  # bytes


def save_tensors(
    tensors: Mapping[str, torch.Tensor], folder: Path, group: dist.ProcessGroup | None = None
) -> dict[str, int]:
    """Write tensors into a new folder; every rank calls this, with the same or other names.

    A tensor that several ranks have by the same name is that of the lowest rank; DTensors are
    written in parts. Returns the CRC-32 of each file of this rank, which are written by then, but
    maybe not on disk yet; on rank 0 the index is among them.
    """
    writer = FileSystemWriter(folder, overwrite=False, sync_files=False)
    writer.fs = files = _ChecksummedFiles()
    try:
        with _alone_without_a_word():
            save(
                dict(tensors),
                storage_writer=writer,
                planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                process_group=group,
                no_dist=rank_and_size()[1] == 1,
            )
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(
            f"rank {rank} could not write its tensors: {getattr(cause, 'strerror', None) or cause}",
            where=str(getattr(cause, "filename", None) or folder),
            fix="see that the disk works and has space, or save elsewhere; older checkpoints"
            " still stand",
        ) from None
    # the index is written by another name first
    return {name.removesuffix(".tmp"): crc for name, crc in files.checksums.items()}


class _ChecksummedFiles(FileSystem):
    """The files that DCP writes, with the CRC-32 of what has been written to each."""

    def __init__(self) -> None:
        self.checksums: dict[str, int] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with io.FileIO(path, mode) as raw:
            stream = _Checksummed(raw)
            try:
                with io.BufferedWriter(stream, _BUFFER) as buffered:
                    yield buffered
            except Exception:
                if stream.failure is None:
                    raise
                # torch.save raises another error where a write has failed
                raise stream.failure from None
            self.checksums[Path(path).name] = stream.crc


class _Checksummed(io.RawIOBase):
    """A file that is written; blocks get their checksum while the system writes them."""

    def __init__(self, raw: io.FileIO) -> None:
        self._raw = raw
        self.crc = 0
        self.failure: OSError | None = None

    def write(self, block: Any) -> int:
        """Write a block in full."""
        data = memoryview(block).cast("B")
        # not of a pool: at the end of the interpreter none takes work
        checking = Thread(target=self._check, args=(data,))
        checking.start()
        at = 0
        try:
            while at < len(data):
                at += self._raw.write(data[at:])
        except OSError as error:
            self.failure = OSError(error.errno, error.strerror, str(self._raw.name))
            raise
        finally:
            checking.join()
        return len(data)

    def _check(self, data: memoryview) -> None:
        self.crc = zlib.crc32(data, self.crc)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._raw.tell()

    def fileno(self) -> int:
        return self._raw.fileno()


class SavedTensors:
    """The tensors that `save_tensors` wrote, whose index has been read.

    `facts` has for each one of the same shape and dtype without data (device "meta").
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = _index_in(folder)
        self.facts = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in self._index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def load(self, wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return new tensors with the values that were saved; every rank calls this.

        They have the shape, dtype and placements of those that are wanted; plain ones come to the
        CPU. A damaged folder is an error on all ranks; other ranks do not notice a tensor that does
        not fit here.
        """
        for name, tensor in wanted.items():
            _require_match(name, tensor, self.facts.get(name), self._folder)
        loaded = {name: _empty_like(tensor) for name, tensor in wanted.items()}
        try:
            with _alone_without_a_word():
                load(
                    loaded,
                    storage_reader=_Reader(self._folder, self._index),
                    planner=_Planner(),
                    no_dist=rank_and_size()[1] == 1,
                )
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise _damaged(self._folder, str(cause)) from None
        return loaded


@contextmanager
def _alone_without_a_word() -> Iterator[None]:
    """Silence DCP's warning that there is one process; it is no accident here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _require_match(
    name: str, wanted: torch.Tensor, saved: torch.Tensor | None, folder: Path
) -> None:
    if saved is None:
        raise CheckpointError(
            f"the checkpoint has no {name!r}, which this run has",
            where=str(folder),
            fix="load a checkpoint of the same models, optimizers and schedulers",
        )
    if (saved.shape, saved.dtype) != (wanted.shape, wanted.dtype):
        raise CheckpointError(
            f"{name} is {described(saved)} in the checkpoint and {described(wanted)} in this run",
            where=str(folder),
            fix="load a checkpoint of a model with the same sizes and dtype",
        )


def described(tensor: torch.Tensor) -> str:
    """Return the dtype and the shape of a tensor."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank has."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        return torch.empty_like(tensor)
    return torch.empty(tensor.shape, dtype=tensor.dtype)


class _Reader(FileSystemReader):
    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._index


def _index_in(folder: Path) -> Metadata:
    try:
        index = read_index(folder / _INDEX)
        is_whole = _is_of_tensors(index, folder)
    except FileNotFoundError as error:
        raise _damaged(folder, f"{Path(error.filename).name} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(folder / _INDEX, str(error)) from None
    if not is_whole:
        raise _damaged(folder / _INDEX, "it lists something else than tensors in this folder")
    return index


def _is_of_tensors(metadata: Metadata, folder: Path) -> bool:
    """Return whether the files hold all of every tensor, so that none takes more memory."""
    paths = {info.relative_path for info in metadata.storage_data.values()}
    if not all(Path(path).name == path for path in paths):
        return False
    room = sum(os.lstat(folder / path).st_size for path in paths)
    for entry in metadata.state_dict_metadata.values():
        if not isinstance(entry, TensorStorageMetadata):
            return False
        volume = math.prod(entry.size)
        room -= volume * entry.properties.dtype.itemsize
        if volume and not _fills([*entry.size], [_box(chunk) for chunk in entry.chunks]):
            return False
    return room >= 0


def _box(chunk: Any) -> _Box:
    """Return where a chunk begins and how long it is, in each dimension."""
    return list(zip(chunk.offsets, chunk.sizes, strict=True))


def _fills(size: list[int], boxes: list[_Box]) -> bool:
    """Return whether boxes fill a tensor, each element once, divided by one dimension at a time.

    So DTensors are divided. Elements that no chunk has would be whatever is in memory.
    """
    if not size:
        return boxes == [[]]
    parts: dict[tuple[int, int], list[_Box]] = {}
    for first, *others in boxes:
        parts.setdefault(first, []).append(others)
    end = 0
    for start, length in sorted(one for one in parts if one[1] != 0):
        if start != end or not _fills(size[1:], parts[start, length]):
            return False
        end = start + length
    return end == size[0]


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")


def _damaged(where: Path, why: str) -> CheckpointError:
    return take_another(f"the tensors of the checkpoint cannot be read: {why}", where)
