"""Writes files atomically."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch


def save_whole(obj: Any, path: str | os.PathLike[str], *, safe: bool = False) -> None:
    """Write `obj` to a file that replaces `path` only once it is complete.

    Args:
        path: a file in an existing folder.
        safe: write a state dict with safetensors instead of torch.save.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        if safe:
            safetensors.torch.save_file(obj, partial, metadata={"format": "pt"})
        else:
            torch.save(obj, partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def save_into(obj: Any, file: IO[bytes], *, safe: bool = False) -> None:
    """Write `obj` into an open file, as `save_whole` does."""
    if safe:
        file.write(safetensors.torch.save(obj, metadata={"format": "pt"}))
    else:
        torch.save(obj, file)
