"""Writes files atomically, on one rank; reads them again."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch

from headway.contract.run import Ranks, read_ranks
from headway.distributed.world import rank_and_size

_logger = logging.getLogger(__name__)


def save(
    obj: Any,
    f: str | os.PathLike[str] | IO[bytes],
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Write `obj` on rank 0, atomically: a file is replaced in full or not at all.

    Args:
        f: a path in an existing folder, or an open binary file.
        save_on_each_node: write on the first rank of each machine instead.
        safe_serialization: write a state dict with safetensors instead of torch.save. Of names for
            one and the same tensor only the first is written.

    Examples:
        >>> import torch
        >>> from headway.utils import load, save
        >>> save({"weight": torch.ones(2)}, "model.pt")
        >>> load("model.pt")
        {'weight': tensor([1., 1.])}
    """
    local_rank = (read_ranks() or Ranks()).local_rank
    if local_rank if save_on_each_node else rank_and_size()[0]:
        return
    if isinstance(f, (str, os.PathLike)):
        save_whole(obj, f, safe=safe_serialization)
    else:
        save_into(obj, f, safe=safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Return what torch.save() wrote; see `torch.load`. By default only weights are read.

    Args:
        f: a path, or an open binary file.
        map_location: the device that tensors go to; None is the one that they were on.
        kwargs: for torch.load(); `weights_only=False` runs code that the file contains.

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

    Of several names for one and the same tensor (tied weights) the first stays, and a warning of
    the logger of this module names the others. Tensors that share memory in another way are copied.
    """
    kept: dict[str, Any] = {}
    tensors, storages = set(), set()
    for name, value in state_dict.items():
        is_sharded = hasattr(value, "full_tensor")  # a DTensor, which has no memory of its own
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
        _logger.warning("Removed shared tensor %s while saving: another name has it", dropped)
    return kept


def save_whole(obj: Any, path: str | os.PathLike[str], *, safe: bool = False) -> None:
    """Write `obj` to a file that replaces `path` only once it is complete.

    Args:
        path: a file in an existing folder.
        safe: write a state dict with safetensors instead of torch.save.
    """
    target = Path(path)
    with replacing([target]) as [partial]:
        write_synced(obj, partial, safe=safe)


@contextmanager
def replacing(targets: Sequence[Path]) -> Iterator[list[Path]]:
    """Give a file to write in place of each of these; at the end they replace them, in order.

    After an error the targets stay as they are.
    """
    partials = [one.with_name(f".{one.name}.{os.getpid()}.tmp") for one in targets]
    try:
        yield partials
        for partial, target in zip(partials, targets, strict=True):
            partial.replace(target)
    finally:
        for partial in partials:
            partial.unlink(missing_ok=True)


def write_synced(obj: Any, path: Path, *, safe: bool = False) -> None:
    """Write `obj` to a file, as `save_whole` does, and wait until the disk has it."""
    if safe:
        safetensors.torch.save_file(without_shared_memory(obj), path, metadata={"format": "pt"})
    else:
        torch.save(obj, path)
    wait_for_disk(path)


def wait_for_disk(path: Path) -> None:
    """Wait until the disk has what was written to a file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def save_into(obj: Any, file: IO[bytes], *, safe: bool = False) -> None:
    """Write `obj` into an open file, as `save_whole` does."""
    if safe:
        file.write(safetensors.torch.save(without_shared_memory(obj), metadata={"format": "pt"}))
    else:
        torch.save(obj, file)
