"""A checkpoint's manifest, which lists versions, and the files with their sizes and checksums."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from headway.errors import CheckpointError, Code
from headway.ipc.paths import is_absent, open_regular, read_plain
from headway.ipc.stderr import shown
from headway.ipc.typed import plain, read

NAME = "manifest.json"
FORMAT = 14
"""The version of the checkpoint layout; other versions are rejected."""

_BLOCK = 2**20
_MAX_ATTEMPTS = 5  # attempts to read a checkpoint while another process replaces it
_CHECKSUM_MISMATCH = "its checksum does not match"


class File(NamedTuple):
    path: str  # relative to the checkpoint, with slashes
    size: int  # bytes
    crc32: int


class Manifest(NamedTuple):
    format: int
    headway: str  # versions
    torch: str
    python: str
    saved_at: float  # seconds since 1970; increases within a folder
    launched_at: float  # start of the launch, unchanged by restarts; 0 without a launcher
    step: int  # optimizer steps done
    epoch: int
    world_size: int
    files: tuple[File, ...]


def describe_files(
    folder: Path, paths: Iterable[str], *, known: Mapping[str, int] = MappingProxyType({})
) -> list[File]:
    """Flush files to disk, and return their sizes and checksums.

    `known` maps paths to CRC-32 checksums that are already known; these files are not read.
    """
    files = []
    for path in paths:
        with _named(folder / path), open_regular(folder / path) as handle:
            size, crc = os.fstat(handle).st_size, known.get(path)
            files.append(_describe(path, handle) if crc is None else File(path, size, crc))
            os.fsync(handle)
    return files


def write_json(path: Path, value: Any) -> None:
    """Write a value to a new JSON file; an OSError contains the file name."""
    with _named(path), open(path, "x", encoding="utf-8") as file:
        file.write(json.dumps(value, allow_nan=False))  # json.dump is six times as slow


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    with _named(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the file name to an OSError that has none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from None


def _describe(path: str, handle: int) -> File:
    size, crc = 0, 0
    while block := os.read(handle, _BLOCK):
        size, crc = size + len(block), zlib.crc32(block, crc)
    return File(path, size, crc)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, and flush it to disk; all other files must already be written."""
    fields = plain(manifest)
    write_json(folder / NAME, fields | {"crc32": _checksum(fields)})
    flush_to_disk(folder / NAME)


def _checksum(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def read_manifest(folder: Path) -> Manifest:
    """Return a checkpoint's manifest; its files are not checked.

    Raises:
        CheckpointError: the manifest is missing, is damaged, or has another format.
    """
    path = folder / NAME
    try:
        data = read_plain(path)
    except PermissionError as error:
        raise _permission_error(path, error) from None
    except (OSError, ValueError) as error:  # ValueError: an invalid path
        if not is_absent(path):
            raise _damaged(path, getattr(error, "strerror", None) or str(error)) from None
        is_folder = os.path.isdir(folder)
        raise CheckpointError(
            "the checkpoint has no manifest" if is_folder else "the checkpoint does not exist",
            where=shown(str(path if is_folder else folder)),
            fix="pass the folder of a checkpoint; `headway checkpoint ls` lists all checkpoints",
            code=Code.NO_CHECKPOINT,
        ) from None
    try:
        return _parsed(data, path)
    except CheckpointError:  # another format; a subclass of ValueError
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(path, str(error)) from None


@lru_cache(maxsize=1024)  # a save reads the manifests of all checkpoints in its folder
def _parsed(data: bytes, path: Path) -> Manifest:
    fields = json.loads(data)
    if not isinstance(fields, dict) or type(fields.get("format")) is not int:
        raise ValueError("the format number is missing")
    if (version := fields["format"]) != FORMAT:
        raise CheckpointError(
            f"the checkpoint has format {version}, written by Headway {fields.get('headway')!r};"
            f" this version reads format {FORMAT}",
            where=shown(str(path)),
            fix="load it with the version of Headway that wrote it",
            code=Code.OTHER_VERSION,
        )
    if fields.pop("crc32", None) != _checksum(fields):
        raise ValueError(_CHECKSUM_MISMATCH)
    return read(Manifest, fields)


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_plain(path))
    except (ValueError, RecursionError, OSError) as error:
        raise unusable(f"the checkpoint cannot be read: {error}", path) from None


def verify(folder: Path, *, launched_at: float = 0.0) -> Manifest:
    """Verify that all files of a checkpoint exist and are unchanged; return its manifest.

    If the launch that started at `launched_at` saved the checkpoint, only sizes are compared. If
    another process replaces the checkpoint in the meantime, the new checkpoint is verified.
    """
    for _ in range(_MAX_ATTEMPTS):
        manifest = read_manifest(folder)
        damage = _find_damage(folder, manifest, launched_at)
        if damage is None:
            return manifest
        if read_manifest(folder) == manifest:
            raise damage
    raise CheckpointError(
        f"the checkpoint was replaced {_MAX_ATTEMPTS} times while it was being read",
        where=shown(str(folder)),
        fix="do not save to this folder from another run at the same time",
        code=Code.NOT_SHARED,
    )


def _find_damage(folder: Path, manifest: Manifest, launched_at: float) -> CheckpointError | None:
    only_sizes = launched_at and manifest.launched_at == launched_at
    for file in manifest.files:
        path = folder / file.path
        try:
            with open_regular(path) as handle:
                if (size := os.fstat(handle).st_size) != file.size:
                    return _damaged(path, f"it has {size} bytes instead of {file.size}")
                if not only_sizes and _describe(file.path, handle) != file:
                    return _damaged(path, _CHECKSUM_MISMATCH)
        except PermissionError as error:
            return _permission_error(path, error)
        except OSError as error:
            return _damaged(path, error.strerror or str(error))
    return None


def unlisted_files(folder: Path, manifest: Manifest) -> list[str]:
    return sorted({*files_below(folder)} - {NAME, *(file.path for file in manifest.files)})


def fail(error: OSError) -> None:
    """Raise an error reported by os.walk(), which skips unreadable folders by default."""
    raise error


def files_below(folder: Path) -> Iterator[str]:
    """Yield the relative paths of all files below a folder, separated by forward slashes.

    Raises OSError if a folder cannot be read.
    """
    for parent, folders, names in os.walk(folder, onerror=fail):
        below = Path(parent).relative_to(folder)
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        yield from ((below / name).as_posix() for name in [*names, *links])


def _permission_error(path: Path, error: PermissionError) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint cannot be read: {error.strerror}",
        where=shown(str(path)),
        fix="run this as a user with read permission, or ask the owner for it (chmod)",
        code=Code.UNREADABLE,
    )


def _damaged(path: Path, why: str) -> CheckpointError:
    return unusable(f"the checkpoint is damaged: {why}", path)


def unusable(what: str, where: Path) -> CheckpointError:
    return CheckpointError(
        what,
        where=shown(str(where)),
        fix="load another checkpoint; `headway checkpoint ls` lists all checkpoints",
        code=Code.DAMAGED,
    )
