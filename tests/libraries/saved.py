"""Folders as transformers' Trainer writes them, without Trainer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file


def writes(folder: Path, step: int) -> Iterator[str]:
    """Write the files of a checkpoint in the order in which Trainer does, one at each step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    yield "config.json"
    save_file({"w": torch.full((64,), float(step))}, folder / "model.safetensors")
    yield "model.safetensors"
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"a": torch.full((64,), float(step))}, folder / name)
        yield name
    (folder / "trainer_state.json").write_text(
        json.dumps({"global_step": step, "loss": [float("nan")]})
    )
    yield "trainer_state.json"


def save(output: Path, step: int, at: float) -> Path:
    """Write a complete checkpoint that was saved at a time."""
    folder = output / f"checkpoint-{step}"
    list(writes(folder, step))
    os.utime(folder / "trainer_state.json", (at, at))
    return folder


def cut(file: Path) -> None:
    """Leave the first half of a file."""
    os.truncate(file, file.stat().st_size // 2)
