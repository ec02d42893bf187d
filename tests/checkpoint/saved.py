"""Small checkpoints for tests, without tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.checkpoint.folders import SaveTimes, commit, create_pending
from headway.checkpoint.manifest import (
    FORMAT,
    NAME,
    Manifest,
    _checksum,
    describe_files,
    files_below,
    write_manifest,
)

TEXTS = {"values.json": "{}", "tensors/a.bin": "a" * 1000, "tensors/b.bin": ""}


def write(folder: Path, step: int = 1, texts: dict[str, str] = TEXTS) -> None:
    """Write files and manifest of a checkpoint into an existing folder."""
    for path, text in texts.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text + str(step))
    files = describe_files(folder, sorted(files_below(folder)))
    saved_at = SaveTimes().next(folder)
    manifest = Manifest(FORMAT, "0.1", "2.13", "3.11", saved_at, 0.0, step, 0, 1, tuple(files))
    write_manifest(folder, manifest)


def save(target: Path, step: int = 1) -> None:
    """Save a checkpoint as training does, in one process."""
    pending = create_pending(target)
    write(pending, step)
    commit(pending, target)


def rewrite(folder: Path, change: Callable[[Any], object] = bool) -> None:
    """Change the manifest of a checkpoint as somebody does who knows the format.

    Args:
        change: gets the fields; the checksums of the files, and then of these, are made right.
    """
    fields = json.loads((folder / NAME).read_text())
    del fields["crc32"]
    described = describe_files(folder, [file["path"] for file in fields["files"]])
    fields["files"] = [file._asdict() for file in described]
    change(fields)
    (folder / NAME).write_text(json.dumps(fields | {"crc32": _checksum(fields)}))
