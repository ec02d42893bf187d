"""A prepared loader's `state_dict()`, for scripts that write checkpoints themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, DataLoaderConfiguration
from headway.checkpoint.manifest import read_manifest
from headway.compat import Accelerator as CompatAccelerator
from headway.errors import CheckpointError


def shuffled() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(24.0)), batch_size=4, shuffle=True)


def test_the_state_of_other_data_is_refused() -> None:
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    loader = Accelerator(cpu=True, dataloader_config=config).prepare(shuffled())
    batches = iter(loader)
    next(batches)
    other = Accelerator(cpu=True).prepare(DataLoader(TensorDataset(torch.ones(8)), batch_size=4))
    with pytest.raises(CheckpointError):
        other.load_state_dict(loader.state_dict())


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
