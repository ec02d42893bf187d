"""What a checkpoint says about the loaders of a training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.checkpoint.manifest import read_manifest
from headway.compat import Accelerator as CompatAccelerator


def shuffled() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(24.0)), batch_size=4, shuffle=True)


@pytest.mark.parametrize("make", [Accelerator, CompatAccelerator])
def test_a_checkpoint_names_the_epoch_that_it_is_in(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    accelerator = make(cpu=True)
    loader = accelerator.prepare(shuffled())
    epochs: list[int | None] = []
    for _ in range(2):
        for _ in loader:
            accelerator.save_state(tmp_path / str(len(epochs)))
            epochs.append(read_manifest(tmp_path / str(len(epochs))).epoch)
    assert epochs == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2]  # the last batch ends an epoch
    accelerator.load_state(tmp_path / "1")
