"""Shares of all ranks side by side, in one process."""

from __future__ import annotations

import pickle
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    SequentialSampler,
)

from headway.data.configuration import DataLoaderConfiguration as Configuration
from headway.data.loader import PreparedDataLoader
from headway.distributed.nested import checksum_of
from headway.errors import UsageError
from tests.data.streams import SizedStream, Stream

LOADERS: dict[str, Any] = {
    "n": st.integers(1, 60),
    "batch_size": st.integers(1, 9),
    "world": st.integers(1, 5),
    "split": st.booleans(),
    "stream": st.booleans(),
}


def shares(
    loader: DataLoader[Any], world: int, seed: int | None = None, **options: Any
) -> list[list[Any]]:
    """Return each rank's batches."""
    config = Configuration(**options)
    loaders = [
        PreparedDataLoader(loader, rank, world, config=config, seed=seed) for rank in range(world)
    ]
    return [[batch.tolist() for batch in prepared] for prepared in loaders]


class Numbers(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 4


@given(**LOADERS)
def test_ranks_get_equal_shares_with_at_most_world_minus_one_repeats(
    n: int, batch_size: int, world: int, split: bool, stream: bool
) -> None:
    data: Any = Stream(range(n)) if stream else range(n)
    loader = DataLoader(data, batch_size=batch_size * (world if split else 1))
    parts = shares(loader, world, split_batches=split)
    sizes = [[len(batch) for batch in part] for part in parts]
    assert sizes == [sizes[0]] * world
    samples = [x for part in parts for batch in part for x in batch]
    assert set(samples) == set(range(n))
    assert len(samples) - n < world


@given(**LOADERS)
def test_uneven_ranks_get_every_sample_once_in_as_many_batches_as_their_length_says(
    n: int, batch_size: int, world: int, split: bool, stream: bool
) -> None:
    data: Any = SizedStream(range(n)) if stream else range(n)
    loader = DataLoader(data, batch_size=batch_size * (world if split else 1))
    config = Configuration(split_batches=split, even_batches=False)
    ranks = [PreparedDataLoader(loader, rank, world, config=config) for rank in range(world)]
    parts = [[batch.tolist() for batch in rank] for rank in ranks]
    assert sorted(x for part in parts for batch in part for x in batch) == [*range(n)]
    assert [len(part) for part in parts] == [len(rank) for rank in ranks]
    assert all(len(batch) <= batch_size for part in parts for batch in part)


def of_size(size: int | None, n: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(n), batch_size=size, **options)  # type: ignore[arg-type]


BUCKETS: Any = [[0], [1, 2], [3, 4, 5], [6], [7, 8]]
READY = torch.arange(6).reshape(3, 2)
SHARES: list[tuple[DataLoader[Any], dict[str, Any], list[Any]]] = [
    (of_size(2, 8), {}, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
    (DataLoader(Stream([]), batch_size=2), {}, [[], []]),
    (DataLoader(Stream(READY), batch_size=None), {}, [[[0, 1], [4, 5]], [[2, 3], [4, 5]]]),
    (of_size(2, 9, drop_last=True), {}, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
    (of_size(2, 9, drop_last=True), {}, [[[0, 1]], [[2, 3]], [[4, 5]]]),
    (of_size(2, 7), {"even_batches": False}, [[[0, 1], [6]], [[2, 3]], [[4, 5]]]),
    (of_size(4, 8), {"split_batches": True}, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
    (
        DataLoader(range(9), batch_sampler=BUCKETS),  # type: ignore[arg-type]
        {},
        [[[0], [3, 4, 5], [7]], [[1, 2], [6], [8]]],
    ),
    (
        of_size(None, 6, sampler=BatchSampler(SequentialSampler(range(6)), 2, False)),
        {},
        [[[0, 1], [4]], [[2, 3], [5]]],
    ),
    (
        of_size(None, 12, sampler=BatchSampler(SequentialSampler(range(12)), 3, False)),
        {},
        [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]]],
    ),
]


@pytest.mark.parametrize(("loader", "options", "expected"), SHARES)
def test_each_rank_gets_its_batches_of_every_round(
    loader: DataLoader[Any], options: dict[str, Any], expected: list[Any]
) -> None:
    assert shares(loader, len(expected), **options) == expected
    assert shares(loader, len(expected), seed=5, **options) == expected, "each sample seeded"


def test_a_loader_that_drops_all_its_batches_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert shares(of_size(5, 9, drop_last=True), 2) == [[], []]
    assert "its 9 samples are fewer than a global batch of 10 (5 for each of 2 ranks)" in (
        capsys.readouterr().err
    )
    shares(of_size(5, 0), 2), shares(of_size(5, 10, drop_last=True), 2)
    assert capsys.readouterr().err == ""


def test_the_script_s_loader_answers_for_everything_else() -> None:
    class Epochs(SequentialSampler):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    sampler = Epochs(range(10))
    loader: DataLoader[Any] = DataLoader(torch.arange(10), batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    prepared = PreparedDataLoader(loader, 0, 2)
    prepared.set_epoch(3)
    assert sampler.epoch == 3
    assert isinstance(prepared, DataLoader)
    assert (prepared.batch_size, prepared.sampler, len(prepared)) == (4, sampler, 2)
    assert prepared.dataset is loader.dataset
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = prepared.no_such_thing


def test_stream_without_length_has_none_after_prepare() -> None:
    prepared = PreparedDataLoader(DataLoader(Stream(range(3)), batch_size=2), 0, 2)
    with pytest.raises(TypeError):
        len(prepared)


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        return map(torch.neg, super().__iter__())


TWO: Any = range(2)
FIRST: Any = DistributedSampler(TWO, num_replicas=2, rank=0)
SPLIT = {"split_batches": True}


@pytest.mark.parametrize(
    ("loader", "options", "said"),
    [
        (DataLoader(TWO, sampler=FIRST), {}, "sharded twice"),
        (DataLoader(TWO, batch_size=3), SPLIT, "multiple of 2"),
        (DataLoader(Stream(TWO), batch_size=None), SPLIT, "batches of the same number"),
        (Doubling(TWO, 2), SPLIT, "size of the Doubling"),
        (Doubling(TWO), {"dispatch_batches": False}, "Doubling overrides __iter__"),
    ],
)
def test_a_loader_that_cannot_be_shared_out_is_refused_with_a_way_out(
    loader: DataLoader[Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        shares(loader, 2, **options)


def test_a_loader_with_its_own_loop_is_asked_for_its_batches() -> None:
    assert shares(Doubling(torch.arange(2)), 1) == [[[0], [-1]]]  # type: ignore[arg-type]


def test_batches_are_moved_to_the_device() -> None:
    loader: DataLoader[Any] = DataLoader(torch.arange(4), batch_size=2)  # type: ignore[arg-type]
    prepared = PreparedDataLoader(loader, 0, 1, device=torch.device("meta"))
    assert [batch.device.type for batch in prepared] == ["meta", "meta"]


class Epochs:
    """Notes which epochs it is told."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


class EpochsSampler(Epochs, SequentialSampler): ...


class EpochsBatches(Epochs, BatchSampler): ...


class EpochsStream(Epochs, Stream): ...


@pytest.mark.parametrize("world", [1, 2])
def test_every_pass_tells_its_number_to_whoever_asks_for_it(world: int) -> None:
    sampler = EpochsSampler(range(4))
    batches, stream = EpochsBatches(sampler, 2, False), EpochsStream(range(4))
    for loader in (
        DataLoader(torch.arange(4), batch_sampler=batches),  # type: ignore[arg-type]
        DataLoader(stream, batch_size=2),
    ):
        prepared = PreparedDataLoader(loader, 0, world)
        for _ in range(2):
            assert sum(1 for _ in prepared) > 0
            next(iter(prepared))
        passes = (batches if loader.dataset is not stream else stream).told
        assert passes == [0, 1, 2, 3]
        prepared.set_epoch(7)
        for _ in range(2):
            assert sum(1 for _ in prepared) > 0
        assert passes[-3:] == [7, 7, 8]
        own = stream if loader.dataset is stream else batches
        for _ in range(2):  # the script's own calls number the passes, too
            own.set_epoch(3)
            assert prepared.epoch == 3
            assert sum(1 for _ in prepared) > 0
        assert passes[-4:] == [3, 3, 3, 3]
        assert isinstance(pickle.loads(pickle.dumps(own)).set_epoch, MethodType)
    assert sampler.told[:7] == batches.told[:7]


@pytest.mark.parametrize("name", ["batch_size", "collate_fn", "num_workers", "sampler"])
def test_a_prepared_loader_refuses_changes_that_would_have_no_effect(name: str) -> None:
    prepared = PreparedDataLoader(DataLoader(Stream(range(4))), 0, 1)
    with pytest.raises(UsageError, match=f"set {name} before prepare"):
        setattr(prepared, name, None)
    prepared.my_note = 5
    assert prepared.my_note == 5


@pytest.mark.parametrize("is_in_batches", [False, True])
def test_a_sampler_that_leaves_samples_to_other_ranks_is_refused(is_in_batches: bool) -> None:
    def prepared(replicas: int) -> PreparedDataLoader:
        sampler: Any = DistributedSampler(Numbers(), num_replicas=replicas, rank=0, shuffle=False)
        options: dict[str, Any] = {"sampler": sampler, "batch_size": 2}
        if is_in_batches:
            options = {"batch_sampler": BatchSampler(sampler, 2, drop_last=False)}
        return PreparedDataLoader(DataLoader(Numbers(), **options), 0, 1)

    assert [batch.tolist() for batch in prepared(1)] == [[0, 1], [2, 3]]
    with pytest.raises(UsageError):
        list(prepared(2))


def test_marks_tell_values_apart_and_not_objects() -> None:
    def samples(last: float) -> list[Any]:
        return [{"text": "a", "array": np.arange(3)}, (torch.tensor([1.0, last]), None, object())]

    assert checksum_of(samples(2.0)) == checksum_of(samples(2.0))
    assert checksum_of(samples(2.0)) != checksum_of(samples(3.0))
    assert checksum_of([np.arange(3)]) != checksum_of([np.arange(1, 4)])
    assert checksum_of([torch.eye(2).to_sparse()]) == checksum_of([torch.eye(2).to_sparse()])
