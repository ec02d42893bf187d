"""A prepared loader's `state_dict()`, for scripts that write checkpoints themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from headway import Accelerator, DataLoaderConfiguration
from headway.checkpoint.manifest import read_manifest
from headway.compat import Accelerator as CompatAccelerator
from headway.errors import CheckpointError
from headway.utils import set_seed


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(24.0))


def shuffled() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(24.0)), batch_size=4, shuffle=True)


def streamed() -> DataLoader[Any]:
    return DataLoader(Stream(), batch_size=4)


def prepared(kind: Callable[[], Any]) -> Any:
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    return Accelerator(cpu=True, dataloader_config=config).prepare(kind())


def values(batches: Any) -> list[Any]:
    return [torch.as_tensor(one[0] if isinstance(one, list) else one).tolist() for one in batches]


@pytest.mark.parametrize("kind", [shuffled, streamed])
def test_the_next_pass_goes_on_where_the_state_was_taken(kind: Callable[[], Any]) -> None:
    set_seed(1)
    loader = prepared(kind)
    batches = iter(loader)
    assert len(list(islice(batches, 2))) == 2
    state = loader.state_dict()
    rest = values(batches)
    assert len(rest) == 4
    loader.load_state_dict(state)
    assert values(loader) == rest

    torch.manual_seed(99)  # another run
    other = prepared(kind)
    other.load_state_dict(state)
    assert values(other) == rest
    assert len(values(other)) == 6, "the pass after it is whole"


def test_the_state_of_other_data_is_refused() -> None:
    loader = prepared(shuffled)
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
