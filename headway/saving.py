"""Writes one file whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save_whole(obj: Any, path: str | os.PathLike[str]) -> None:
    """Write `obj` with torch.save; whoever reads `path` finds the old file or the new one.

    Args:
        path: a file in a folder that exists.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            torch.save(obj, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
