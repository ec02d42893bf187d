"""Each option of DataLoaderConfiguration is obeyed or refused."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from headway import Accelerator
from headway.data.configuration import DataLoaderConfiguration
from headway.data.loader import PreparedDataLoader
from headway.errors import UsageError


def test_the_accelerator_shows_what_its_loaders_follow() -> None:
    config = DataLoaderConfiguration(
        split_batches=True, even_batches=False, use_seedable_sampler=True, non_blocking=True
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    assert accelerator.split_batches
    assert not accelerator.even_batches
    assert accelerator.dataloader_config == config
    config = DataLoaderConfiguration(non_blocking=True)
    assert Accelerator(cpu=True, split_batches=True, dataloader_config=config).split_batches


def test_options_that_are_set_later_hold_for_loaders_that_are_prepared_later() -> None:
    config = DataLoaderConfiguration()
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    config.use_seedable_sampler, config.data_seed = True, 3
    followed: Any = accelerator  # its properties change between assertions
    makers = accelerator, accelerator, Accelerator(cpu=True, dataloader_config=config)
    first, second, again = (
        [int(x) for x in maker.prepare(DataLoader(range(9), shuffle=True))]  # type: ignore[arg-type]
        for maker in makers
    )
    assert first == again != second, "each of several loaders has an order of its own"

    accelerator.dataloader_config = DataLoaderConfiguration(even_batches=False)
    assert not followed.even_batches
    accelerator.even_batches = True
    assert followed.dataloader_config.even_batches
    config.use_seedable_sampler = False
    with pytest.raises(UsageError, match="data_seed"):
        accelerator.dataloader_config = config
    with pytest.raises(UsageError, match="data_seed"):
        Accelerator(cpu=True, dataloader_config=config)


def test_under_a_global_batch_size_loaders_split_their_batches_whatever_is_set_later() -> None:
    accelerator = Accelerator(cpu=True, global_batch_size=4)
    accelerator.dataloader_config = DataLoaderConfiguration(even_batches=False)
    assert accelerator.split_batches
    assert not accelerator.even_batches


def orders(loader: DataLoader[Any], **options: Any) -> list[list[Any]]:
    """Return two passes, with other random numbers drawn before each."""
    config = DataLoaderConfiguration(use_seedable_sampler=True, **options)
    prepared = PreparedDataLoader(loader, 0, 1, config=config)
    passes = []
    for drawn in range(2):
        torch.rand(drawn)
        passes.append([batch.tolist() for batch in prepared])
    return passes


def test_a_seeded_order_depends_on_the_seed_and_the_epoch_only() -> None:
    data: Any = torch.arange(50)
    kinds = [
        DataLoader(data, batch_size=3, shuffle=True),
        DataLoader(data, batch_size=None, sampler=BatchSampler(RandomSampler(data), 3, False)),
    ]
    for loader in kinds:
        first, second = orders(loader, data_seed=7)
        assert [first, second] == orders(loader, data_seed=7) != orders(loader, data_seed=8)
        assert first != second
    single = DataLoader(data, batch_size=None, shuffle=True)
    assert orders(single, data_seed=7)[0] == [*chain(*orders(kinds[0], data_seed=7)[0])]
    assert type(kinds[0].sampler) is RandomSampler  # the script's own is left as it was
