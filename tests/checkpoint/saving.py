"""Saves a checkpoint in one call, as the runtime does in two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headway.checkpoint.folders import SaveTimes
from headway.checkpoint.saving import (
    CheckpointProgress,
    Contents,
    prepare_checkpoint,
    write_prepared,
)


def save_checkpoint(
    target: Path,
    state: Callable[[Path], Contents],
    progress: CheckpointProgress,
    *,
    then: Callable[[], object] = bool,
) -> None:
    """Write a checkpoint and commit it; see `prepare_checkpoint`."""
    write_prepared(prepare_checkpoint(target, state, progress, SaveTimes(), then=then))
