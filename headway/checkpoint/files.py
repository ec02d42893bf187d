"""Saves objects and model weights atomically on a single rank, and loads them."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import safetensors.torch
import torch

from headway.checkpoint.manifest import flush_to_disk
from headway.distributed.collectives import full_tensor
from headway.distributed.handler import check_range, checked
from headway.distributed.nested import is_instance_of, tensors_with_paths
from headway.distributed.world import rank_and_size
from headway.errors import Code, UsageError
from headway.ipc.paths import is_absent
from headway.ipc.run_contract import Ranks, read_ranks

_logger = logging.getLogger(__name__)


@checked
def save(
    obj: Any,
    f: str | os.PathLike[str] | IO[bytes],
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Save `obj` on rank 0, atomically: a file is replaced completely or not at all.

    Targets that are not regular files, such as a pipe or /dev/null, are written to directly.

    Args:
        obj: the object to save; with `safe_serialization`, a state dict.
        f: a path in an existing folder, or an open binary file.
        save_on_each_node: save on the first rank of each machine instead.
        safe_serialization: use safetensors instead of torch.save. A tensor with several names is
            saved under the first name only.

    Examples:
        >>> import torch
        >>> from headway.utils import load, save
        >>> save({"weight": torch.ones(2)}, "model.pt")
        >>> load("model.pt")
        {'weight': tensor([1., 1.])}
    """
    for path, tensor in tensors_with_paths(obj):
        if is_instance_of(tensor, "torch.distributed.tensor", "DTensor"):
            raise UsageError(
                f"{path or 'the tensor'} is sharded, and save() writes only one rank's part",
                where="the script's save(...)",
                fix="save accelerator.get_state_dict(model), which every rank must call, or use"
                " save_model() or save_state()",
                code=Code.UNSAVABLE,
            )
    local_rank = (read_ranks() or Ranks()).local_rank
    if local_rank if save_on_each_node else rank_and_size()[0]:
        return
    if not isinstance(f, (str, os.PathLike)):
        _write(obj, f, safe_serialization)
    elif is_absent(f) or os.path.isfile(f):
        with replacing([Path(f)]) as [partial]:
            write_synced(obj, partial, safe=safe_serialization)
    else:
        with open(f, "wb") as file:
            _write(obj, file, safe_serialization)


def _write(obj: Any, file: IO[bytes], safe: bool) -> None:
    if safe:
        file.write(safetensors.torch.save(without_shared_memory(obj), metadata={"format": "pt"}))
    else:
        torch.save(obj, file)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Load an object saved with torch.save(). By default, only weights can be loaded.

    Args:
        f: a path, or an open binary file.
        map_location: the device to load tensors on; None uses the device they were saved from.
        kwargs: passed to torch.load(); `weights_only=False` runs code that the file contains.

    Examples:
        >>> import torch
        >>> from headway.utils import load
        >>> torch.save({"weight": torch.ones(2)}, "model.pt")
        >>> load("model.pt", map_location="cpu")
        {'weight': tensor([1., 1.])}
    """
    return torch.load(f, map_location=map_location, **kwargs)


def without_shared_memory(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict that safetensors can write: contiguous tensors that share no memory.

    If a tensor has several names (tied weights), only the first name is kept, and a warning lists
    the other names. Tensors that share memory in other ways are copied.
    """
    kept: dict[str, Any] = {}
    tensors, storages = set(), set()
    for name, value in state_dict.items():
        is_sharded = hasattr(value, "full_tensor")  # a DTensor itself has no storage
        if not isinstance(value, torch.Tensor) or value.numel() == 0 or is_sharded:
            kept[name] = value
            continue
        storage = (value.device, value.untyped_storage().data_ptr())
        tensor = (*storage, value.storage_offset(), value.shape, value.stride(), value.dtype)
        if tensor not in tensors:
            kept[name] = (
                value.contiguous()
                if storage not in storages
                else value.clone(memory_format=torch.contiguous_format)
            )
        tensors.add(tensor)
        storages.add(storage)
    dropped = [name for name in state_dict if name not in kept]
    if dropped:
        _logger.warning("Removed shared tensors %s, which are saved under other names", dropped)
    return kept


def original_names(state_dict: Any) -> Any:
    """Return a state dict without the prefixes that `torch.compile` adds to names."""
    renamed = {re.sub(r"\b_orig_mod\.", "", name): value for name, value in state_dict.items()}
    return renamed if renamed.keys() != state_dict.keys() else state_dict  # keeps its _metadata


@contextmanager
def replacing(targets: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield temporary paths for the targets; unless the block fails, rename them to the targets."""
    parent, name = targets[0].parent, targets[0].name
    with TemporaryDirectory(".tmp", f".{name}.", parent, ignore_cleanup_errors=True) as folder:
        partials = [Path(folder, target.name) for target in targets]
        yield partials
        for partial, target in zip(partials, targets, strict=True):
            partial.replace(target)


def write_synced(obj: Any, path: Path, *, safe: bool = False) -> None:
    if safe:
        safetensors.torch.save_file(without_shared_memory(obj), path, metadata={"format": "pt"})
    else:
        torch.save(obj, path)
    flush_to_disk(path)


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
    max_shard_size: int | str,
    safe_serialization: bool,
    *,
    writes: bool,
) -> None:
    """Save a state dict to a single file, or to several files with an index; see `save_model`.

    If tensors are sharded, every rank must call this, but only the rank with `writes=True` writes.
    Tensors are gathered one file at a time.
    """
    limit, folder = convert_file_size_to_int(max_shard_size), Path(save_directory)
    check_range("save_model", 1, max_shard_size=limit)
    _check(state_dict, folder, safe_serialization)
    state = without_shared_memory(original_names(state_dict))
    name = SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME
    shards = _shards(state, limit)
    (stem, suffix), of = name.rsplit(".", 1), len(shards)
    numbered = [f"{stem}-{number:05}-of-{of:05}.{suffix}" for number in range(1, of + 1)]
    names = [name] if of == 1 else numbered
    index = [f"{name}.index.json"] if len(shards) > 1 else []
    if not writes:
        for key in chain.from_iterable(shards):
            full_tensor(state[key])
        return
    folder.mkdir(parents=True, exist_ok=True)
    with replacing([folder / file for file in (*names, *index)]) as partials:
        for shard, partial in zip(shards, partials, strict=False):
            entries = {key: full_tensor(state[key]) for key in shard}
            write_synced(entries, partial, safe=safe_serialization)
        if index:
            total_size = sum(getattr(tensor, "nbytes", 0) for tensor in state.values())
            files = zip(names, shards, strict=True)
            weight_map = {key: file for file, shard in files for key in shard}
            text = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
            partials[-1].write_text(json.dumps(text, indent=2, sort_keys=True) + "\n", "utf-8")
            flush_to_disk(partials[-1])
            (folder / index[0]).unlink(missing_ok=True)  # no index until all its files exist
    _remove_others(folder, name, {*names, *index})


def convert_file_size_to_int(size: int | str) -> int:
    """Convert a size such as 5000, "5KB" or "4.9KiB" to bytes: 5000, 5000, 5017.

    Raises:
        UsageError: `size` is not a valid size.

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
            f"invalid size {size!r}",
            where="max_shard_size",
            fix='pass an integer number of bytes, or a string such as "5GB" or "500MiB"',
            code=Code.BAD_ARGUMENT,
        )
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _check(state_dict: Mapping[str, Any], folder: Path, only_tensors: bool) -> None:
    if folder.is_file():
        raise UsageError(
            f"{str(folder)!r} is a file",
            where="save_directory",
            fix="pass an existing or new folder",
            code=Code.BAD_ARGUMENT,
        )
    for name, tensor in state_dict.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            raise UsageError(
                f"{name} is on the meta device and has no data",
                where="the model to save",
                fix="load the weights before saving the model",
                code=Code.MODEL_DEVICE,
            )
        if only_tensors and not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"{name} is a {type(tensor).__name__}, but safetensors supports only tensors",
                where="the model to save",
                fix="pass safe_serialization=False",
                code=Code.UNSAVABLE,
            )


def _shards(state: Mapping[str, Any], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    room = limit
    for name, tensor in state.items():
        size = getattr(tensor, "nbytes", 0)  # an extra state may not be a tensor
        room -= size
        if room < 0 and shards[-1]:
            shards.append([])
            room = limit - size
        shards[-1].append(name)
    return shards


def _remove_others(folder: Path, name: str, kept: set[str]) -> None:
    """Remove the files of an earlier save, which readers would otherwise also load."""
    stem, suffix = map(re.escape, name.rsplit(".", 1))
    earlier = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.{suffix}(\.index\.json)?")
    for path in folder.iterdir():
        if path.name not in kept and earlier.fullmatch(path.name):
            path.unlink()
