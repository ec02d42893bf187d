"""Writes the weights of a model as Hugging Face libraries read them: in files of limited size."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from headway.checkpoint import files as saving
from headway.errors import UsageError

SAFE_WEIGHTS_NAME = "model.safetensors"
WEIGHTS_NAME = "pytorch_model.bin"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def save_weights(
    state_dict: Mapping[str, Any],
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    *,
    read_whole: Callable[[Any], Any] = lambda tensor: tensor,
    writes: bool = True,
) -> None:
    """Write a state dict into one file, or into several and an index of them.

    Where tensors are sharded every rank calls this, and one of them writes; no more of them than
    those of one file are whole at a time.

    Files of an earlier save into the same folder are removed.

    Args:
        state_dict: names and tensors; of several names for one tensor the first is written.
        save_directory: a folder, which is created.
        max_shard_size: the size of a file's tensors, in bytes or such as "5MB" (10**6 bytes) or
            "5MiB" (2**20 bytes). A larger tensor gets a file of its own.
        safe_serialization: write `model.safetensors`, instead of `pytorch_model.bin` by torch.save.
        read_whole: returns a tensor of the state in full; called on every rank in the same order.
        writes: whether this rank writes.

    Raises:
        UsageError: `max_shard_size` is no size, `save_directory` is a file, or a tensor has no data
            (on the meta device).
    """
    limit, folder = convert_file_size_to_int(max_shard_size), Path(save_directory)
    _check(state_dict, folder)
    state = saving.without_shared_memory(state_dict)
    name = SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME
    shards = _shards(state, limit)
    names = [name] if len(shards) == 1 else _numbered(name, len(shards))
    index = [f"{name}.index.json"] if len(shards) > 1 else []
    if not writes:
        for shard in shards:
            for key in shard:
                read_whole(state[key])
        return
    folder.mkdir(parents=True, exist_ok=True)
    with saving.replacing([folder / one for one in (*names, *index)]) as partials:
        for shard, partial in zip(shards, partials, strict=False):
            tensors = {key: read_whole(state[key]) for key in shard}
            saving.write_synced(tensors, partial, safe=safe_serialization)
        if index:
            partials[-1].write_text(
                _index(dict(zip(names, shards, strict=True)), state), encoding="utf-8"
            )
            saving.wait_for_disk(partials[-1])
            (folder / index[0]).unlink(missing_ok=True)  # no index before all its files are there
    _remove_others(folder, name, {*names, *index})


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size in bytes: that of 5000, "5KB" or "4.9KiB" is 5000, 5000 and 5017.

    Raises:
        UsageError: it is no such size.

    Examples:
        >>> from headway.utils import convert_file_size_to_int
        >>> convert_file_size_to_int("5MB"), convert_file_size_to_int("1KiB")
        (5000000, 1024)
    """
    if isinstance(size, int) and size >= 0:
        return size
    found = _SIZE.fullmatch(str(size))
    if found is None or found[2].upper() not in _UNITS:
        raise UsageError(
            f"{size!r} is not a size in bytes",
            where="max_shard_size",
            fix='pass a whole number of bytes, or a text such as "5GB" or "500MiB"',
        )
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _check(state_dict: Mapping[str, Any], folder: Path) -> None:
    if folder.is_file():
        raise UsageError(
            f"{str(folder)!r} is a file",
            where="save_directory",
            fix="pass a folder, which may be a new one",
        )
    for name, tensor in state_dict.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            raise UsageError(
                f"{name} is on the meta device, without data",
                where="the model that is saved",
                fix="load the weights before saving the model",
            )


def _shards(state: Mapping[str, Any], limit: int) -> list[list[str]]:
    """Return the names for each file, in order, as many as fit."""
    shards: list[list[str]] = [[]]
    room = limit
    for name, tensor in state.items():
        room -= tensor.nbytes
        if room < 0 and shards[-1]:
            shards.append([])
            room = limit - tensor.nbytes
        shards[-1].append(name)
    return shards


def _numbered(name: str, count: int) -> list[str]:
    stem, suffix = name.rsplit(".", 1)
    return [f"{stem}-{number:05}-of-{count:05}.{suffix}" for number in range(1, count + 1)]


def _index(shards: Mapping[str, list[str]], state: Mapping[str, Any]) -> str:
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in state.values())},
        "weight_map": {name: file for file, names in shards.items() for name in names},
    }
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _remove_others(folder: Path, name: str, kept: set[str]) -> None:
    """Remove the files of an earlier save, which a reader would take for parts of this one."""
    stem, suffix = map(re.escape, name.rsplit(".", 1))
    earlier = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.{suffix}(\.index\.json)?")
    for path in folder.iterdir():
        if path.name not in kept and earlier.fullmatch(path.name):
            path.unlink()
