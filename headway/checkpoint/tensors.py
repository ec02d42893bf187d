"""Saves tensors with torch.distributed.checkpoint (DCP), and loads them with any world size.

DCP's index, `.metadata`, is a pickle. Headway writes this file for DCP only, and never reads it.
Instead, Headway reads the same index from a JSON file.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from headway.checkpoint.manifest import unusable
from headway.distributed.world import rank_and_size
from headway.errors import CheckpointError, Code
from headway.ipc.typed import read

INDEX = "index.json"
_LIMITS = {
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`)",
}
_BUFFER_SIZE = 2**20  # bytes
_SMALL_BLOCK = 2**18  # bytes; up to this size, a checksum is faster than starting a thread


def fix_of(error: OSError) -> str:
    """Return the fix for an error of a write."""
    disk = "check that the disk works and has free space, or save elsewhere"
    return f"{_LIMITS.get(error.errno or 0, disk)}; older checkpoints are intact"


class Part(NamedTuple):
    offsets: tuple[int, ...]  # of this part in the tensor, by dimension
    sizes: tuple[int, ...]
    file: str  # in the same folder
    start: int  # first byte in the file
    length: int  # bytes, including torch.save's header


class TensorEntry(NamedTuple):
    """A saved tensor; its parts together contain all elements."""

    dtype: str  # its name in torch
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class Index(NamedTuple):
    tensors: Mapping[str, TensorEntry]


def save_tensors(
    tensors: Mapping[str, torch.Tensor],
    folder: Path,
    group: dist.ProcessGroup | None = None,
    pause: Callable[[], object] = bool,
) -> dict[str, int]:
    """Write tensors to a new folder; a collective call. Names may differ between ranks.

    The lowest rank that passes a tensor writes it; each rank writes its own part of a DTensor.
    `pause` is called when torch flushes the file, which is twice per tensor.

    Returns the CRC-32 of each file that this rank has written, including the indexes on rank 0; the
    files may not be flushed to disk yet.
    """
    writer = _Writer(folder, overwrite=False, sync_files=False)
    writer.fs = files = _ChecksummedFiles(pause)
    try:
        with _single_process_quietly():
            save(
                _by_prefix(tensors),
                storage_writer=writer,
                planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                process_group=group,
                no_dist=rank_and_size()[1] == 1,
            )
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if not isinstance(cause, OSError):
            raise
        raise CheckpointError(
            f"rank {rank} could not write its tensors: {cause.strerror or cause}",
            where=str(cause.filename or folder),
            fix=fix_of(cause),
            code=Code.UNWRITABLE,
            is_of_all_ranks=True,
        ) from None
    # the index is first written under a temporary name
    return {name.removesuffix(".tmp"): crc for name, crc in files.checksums.items()}


def _by_prefix(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Group tensors by the first part of their names, because DCP logs each entry that it saves.

    DCP joins the parts again, so the names in the checkpoint do not change.
    """
    grouped: dict[str, Any] = {}
    for name, tensor in tensors.items():
        prefix, dot, rest = name.partition(".")
        part, key = (grouped.setdefault(prefix, {}), rest) if dot else (grouped, name)
        part[key] = tensor
    return grouped


class _Writer(FileSystemWriter):
    """Writes DCP's index, and the same index as JSON."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            parts = []
            for chunk in entry.chunks:
                info = places[MetadataIndex(name, chunk.offsets)]
                place = info.relative_path, info.offset, info.length
                parts.append(Part(tuple(chunk.offsets), tuple(chunk.sizes), *place))
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[name] = TensorEntry(dtype, tuple(entry.size), tuple(parts))
        path = self.fs.concat_path(self.path, INDEX)
        with self.fs.create_stream(path, "wb") as file:
            file.write(json.dumps(Index(tensors)).encode())


class _ChecksummedFiles(FileSystem):
    def __init__(self, pause: Callable[[], object]) -> None:
        self.checksums: dict[str, int] = {}
        self._pause = pause

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with open(path, mode, buffering=0) as raw:  # `headway estimate` redirects open()
            stream = _Checksummed(raw)
            try:
                with _Buffered(stream, self._pause) as buffered:
                    yield buffered
            except Exception:
                if stream.failure is None:
                    raise
                # torch.save hides the error of a failed write
                raise stream.failure from None
            self.checksums[Path(path).name] = stream.crc


class _Buffered(io.BufferedWriter):
    """Combines writes of small tensors, because torch.save flushes its file after each tensor."""

    def __init__(self, raw: io.RawIOBase, pause: Callable[[], object]) -> None:
        super().__init__(raw, _BUFFER_SIZE)
        self._pause = pause

    def flush(self) -> None:
        self._pause()

    def close(self) -> None:
        try:
            if not self.closed:
                super().flush()
        finally:  # otherwise, the interpreter would try to write the rest while it exits
            super().close()


class _Checksummed(io.RawIOBase):
    """A file with a checksum, which a thread computes while large blocks are written."""

    def __init__(self, raw: IO[Any]) -> None:
        self._raw = raw
        self.crc = 0
        self.failure: OSError | None = None

    def write(self, block: Any) -> int:
        data = memoryview(block).cast("B")
        if len(data) <= _SMALL_BLOCK:
            self._check(data)
            self._write(data)
            return len(data)
        # not a thread pool, which accepts no work during interpreter shutdown
        checking = Thread(target=self._check, args=(data,))
        checking.start()
        try:
            self._write(data)
        finally:
            checking.join()
        return len(data)

    def _write(self, data: memoryview) -> None:
        at = 0
        try:
            while at < len(data):
                at += self._raw.write(data[at:])
        except OSError as error:
            self.failure = OSError(error.errno, error.strerror, str(self._raw.name))
            raise

    def _check(self, data: memoryview) -> None:
        self.crc = zlib.crc32(data, self.crc)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._raw.tell()

    def fileno(self) -> int:
        return self._raw.fileno()


class SavedTensors:
    """Tensors in a folder written by `save_tensors`; `meta_tensors` has their shapes and dtypes."""

    def __init__(self, folder: Path) -> None:
        self._folder, path = folder, folder / INDEX
        try:
            self._index = read(Index, json.loads(path.read_bytes()))
            entries = self._index.tensors
            self.meta_tensors = {name: _meta_tensor(name, entry) for name, entry in entries.items()}
            files = {part.file for entry in entries.values() for part in entry.parts}
            size = sum(_size_of(folder, name) for name in files)
            if (needed := sum(meta.nbytes for meta in self.meta_tensors.values())) > size:
                raise ValueError(f"its tensors need {needed} bytes, but its files contain {size}")
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or (str(error).splitlines() or [""])[0]
            raise _damaged(path, why) from None

    def load(self, wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Load tensors with the placements of `wanted`; a collective call.

        `wanted` has the shapes and dtypes of `meta_tensors`. Plain tensors are loaded on the CPU.
        If the folder is damaged, all ranks raise an error.
        """
        loaded = {
            name: torch.empty_like(like)
            if isinstance(like, DTensor)
            else torch.empty(like.shape, dtype=like.dtype)
            for name, like in wanted.items()
        }
        try:
            with _single_process_quietly():
                load(
                    loaded,
                    storage_reader=_Reader(self._folder, self._index),
                    planner=DefaultLoadPlanner(),
                    no_dist=rank_and_size()[1] == 1,
                )
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise _damaged(self._folder, str(cause)) from None
        return loaded


@contextmanager
def _single_process_quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        expected = "torch.distributed is disabled|TypedStorage is deprecated"  # up to torch 2.8
        warnings.filterwarnings("ignore", expected, UserWarning)
        yield


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Reader(FileSystemReader):
    def __init__(self, folder: Path, index: Index) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Convert the index to DCP's format; `_StorageInfo` is private in torch."""
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        tensors: dict[str, Any] = {}
        files = {}
        for name, entry in self._index.tensors.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
                for part in entry.parts
            ]
            properties = TensorProperties(dtype=_dtype(entry))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
            for part in entry.parts:
                info = _StorageInfo(part.file, part.start, part.length)
                files[MetadataIndex(name, part.offsets)] = info
        return Metadata(state_dict_metadata=tensors, storage_data=files)


def _dtype(entry: TensorEntry) -> torch.dtype:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry.dtype!r} is not a dtype")
    return dtype


def _meta_tensor(name: str, entry: TensorEntry) -> torch.Tensor:
    """Return a meta tensor after checking that the parts contain all elements."""
    meta = torch.empty(entry.shape, dtype=_dtype(entry), device="meta")
    for part in entry.parts:
        places = zip(part.offsets, part.sizes, entry.shape, strict=True)
        if any(min(at, size) < 0 or at + size > whole for at, size, whole in places):
            raise ValueError(f"a part of {name} is out of bounds")
    if (found := sum(math.prod(part.sizes) for part in entry.parts)) != meta.numel():
        raise ValueError(f"the parts of {name} have {found} elements, not {meta.numel()}")
    return meta


def _size_of(folder: Path, name: str) -> int:
    """Return the size of a regular file in this folder; raise ValueError for anything else."""
    status = os.lstat(folder / name)
    if os.path.basename(name) != name or not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{name!r} is not a file in the same folder")
    return status.st_size


def _damaged(where: Path, why: str) -> CheckpointError:
    return unusable(f"the tensors of the checkpoint cannot be read: {why}", where)
