"""Resuming in the middle of an epoch."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from headway.data.configuration import DataLoaderConfiguration as Configuration
from headway.data.loader import PreparedDataLoader, skip_first_batches
from headway.errors import CheckpointError
from tests.data.streams import SizedStream, StatefulStream
from tests.data.test_sharding import EpochsSampler


class Loads(Dataset[int]):
    """Notes which samples are loaded."""

    def __init__(self, samples: range) -> None:
        self.samples = samples
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return self.samples[index]


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def prepared(data: Any, world: int, **options: Any) -> list[PreparedDataLoader]:
    loaders = [DataLoader(copy(data), batch_size=2) for _ in range(world)]
    config = Configuration(**options)
    return [PreparedDataLoader(dl, rank, world, config=config) for rank, dl in enumerate(loaders)]


def test_a_plain_loader_without_its_first_batches_loads_none_of_them() -> None:
    data = Loads(range(7))
    skipped = skip_first_batches(DataLoader(data, batch_size=2), 2)
    assert (batches(skipped), len(skipped), data.loaded) == ([[4, 5], [6]], 2, [4, 5, 6])


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_prepared_loader_goes_on_where_the_epoch_was_left(
    world: int, even: bool, is_stream: bool
) -> None:
    data: Any = (SizedStream if is_stream else Loads)(range(9))
    for loader in prepared(data, world, even_batches=even):
        whole = batches(loader)
        for skip in range(7):
            skipped = skip_first_batches(loader, skip)
            assert (batches(skipped), len(skipped)) == (whole[skip:], len(whole[skip:]))
            again = skip_first_batches(skip_first_batches(loader, skip // 2), skip - skip // 2)
            assert (batches(again), len(again)) == (whole[skip:], len(whole[skip:]))


@pytest.mark.parametrize("world", [1, 2])
def test_no_rank_loads_what_it_leaves_out(world: int) -> None:
    data = Loads(range(9))
    for loader in prepared(data, world):
        batches(loader)  # in their first pass ranks load a batch to compare it
        data.loaded.clear()
        rest = batches(skip_first_batches(loader, 2))
        assert data.loaded == [x for batch in rest for x in batch]


def test_a_loader_with_an_iter_of_its_own_leaves_out_the_batches_that_this_one_gives() -> None:
    class Twice(DataLoader[Any]):
        def __iter__(self) -> Any:
            yield from super().__iter__()
            yield from super().__iter__()

    loader = Twice(Loads(range(4)), batch_size=2)
    assert batches(skip_first_batches(loader, 3)) == [[2, 3]]
    assert batches(skip_first_batches(PreparedDataLoader(loader), 3)) == [[2, 3]]


def test_a_pass_over_the_rest_of_an_epoch_counts_as_that_epoch() -> None:
    sampler = EpochsSampler(range(4))
    loader = PreparedDataLoader(DataLoader(Loads(range(4)), sampler=sampler))
    loader.set_epoch(3)
    batches(skip_first_batches(loader, 1))
    batches(loader)
    assert sampler.told == [3, 3, 4]


def test_the_rest_of_a_shuffled_epoch_is_the_one_that_was_left() -> None:
    config = Configuration(use_seedable_sampler=True, data_seed=1)
    data: Any = torch.arange(20)
    loader = DataLoader(data, batch_size=2, shuffle=True)
    whole = PreparedDataLoader(loader, 0, 2, config=config)
    expected = batches(whole)
    whole.set_epoch(0)
    assert batches(skip_first_batches(whole, 3)) == expected[3:]


def own_loaders(data: Any, world: int) -> list[PreparedDataLoader]:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return super().__iter__()

    return [PreparedDataLoader(Own(data, batch_size=2), 0, world)]


def dispatched(data: Any, world: int) -> list[PreparedDataLoader]:
    return prepared(data, world, dispatch_batches=True)[:1]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", [Loads, SizedStream, StatefulStream])
@pytest.mark.parametrize("make", [prepared, dispatched, own_loaders])
def test_a_run_that_goes_on_leaves_out_what_the_script_asks_for(
    make: Any, kind: Any, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lambda received, sent: received.__setitem__(0, sent[0])  # noqa: E731 - as rank 0 gets it
    monkeypatch.setattr(torch.distributed, "scatter_object_list", first)
    whole = [batches(loader) for loader in make(kind(range(14)), world)]
    for skip in (2, 1, 3):
        loaders = make(kind(range(14)), world), make(kind(range(14)), world)
        for expected, interrupted, other in zip(whole, *loaders, strict=True):
            current = iter(interrupted)
            next(current), next(current)
            position = interrupted.state_dict()
            current.close()
            other.seek(position)
            assert batches(skip_first_batches(other, skip)) == expected[skip:]
            assert batches(other) == expected, "the next pass is a whole one"


def test_a_stream_goes_on_after_whole_rounds_of_as_many_ranks() -> None:
    (loader,) = prepared(SizedStream(range(9)), 1)
    for number, _ in enumerate(loader, 1):
        if number == 3:
            position = loader.state_dict()
    prepared(SizedStream(range(9)), 3)[0].load_state_dict(position)
    with pytest.raises(
        CheckpointError, match="ranks read together is 2 in this run and a divisor of 3"
    ):
        prepared(SizedStream(range(9)), 2)[0].load_state_dict(position)
