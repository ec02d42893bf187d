"""headway.compat.data_loader beside the installed Accelerate: the same batches, case by case."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from headway.compat import data_loader as ours
from tests.data.streams import SizedStream

theirs: Any = pytest.importorskip("accelerate.data_loader")
BOTH = (ours, theirs)
RANKS = [(world, rank) for world in range(1, 5) for rank in range(world)]
SIZES = list(product(range(13), range(1, 5), (False, True)))


class Buckets:
    """Batches of the script's own sizes."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(n)) for n in range(1, self.n + 1))


def seen(loader: Any) -> tuple[list[Any], Any]:
    """Return the batches, and the length, both of which may be missing."""
    return [x.tolist() if isinstance(x, torch.Tensor) else list(x) for x in loader], len(loader)


def prepared(lib: Any, loader: Any, world: int, rank: int, **options: Any) -> Any:
    """Return what a package makes of a loader on a rank."""
    return lib.prepare_data_loader(loader, num_processes=world, process_index=rank, **options)


@pytest.mark.parametrize(("split", "even"), [*product((False, True), (False, True))])
def test_batch_sampler_shards_give_the_same_batches(split: bool, even: bool) -> None:
    for (n, size, drop), (world, rank) in product(SIZES, RANKS):
        size = size * world if split else size
        found = [
            seen(
                lib.BatchSamplerShard(
                    BatchSampler(SequentialSampler(range(n)), size, drop), world, rank, split, even
                )
            )
            for lib in BOTH
        ]
        assert found[0] == found[1], (n, size, drop, world, rank)


@pytest.mark.parametrize("even", [False, True])
def test_shards_of_batches_of_any_size_are_the_same(even: bool) -> None:
    for n, (world, rank) in product(range(9), RANKS):
        found = [
            seen(lib.BatchSamplerShard(Buckets(n), world, rank, even_batches=even)) for lib in BOTH
        ]
        assert found[0] == found[1], (n, world, rank)


@pytest.mark.parametrize("split", [False, True])
def test_shards_of_streams_give_the_same_samples(split: bool) -> None:
    for (n, size, drop), (world, rank) in product(SIZES, RANKS):
        size = size * world if split else size
        shards = [
            lib.IterableDatasetShard(SizedStream(range(n)), size, drop, world, rank, split)
            for lib in BOTH
        ]
        assert [list(shards[0]), len(shards[0])] == [list(shards[1]), len(shards[1])]


class Parts(IterableDataset[int]):
    """A stream in parts, such as those of Hugging Face's `datasets`."""

    def __init__(self, n: int, parts: tuple[int, ...] = (0, 1, 2)) -> None:
        self.n, self.parts = n, parts

    @property
    def n_shards(self) -> int:
        return len(self.parts)

    def __len__(self) -> int:
        return self.n * len(self.parts)

    def shard(self, num_shards: int, index: int) -> Parts:
        return Parts(self.n, self.parts[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        return (10 * part + i for part in self.parts for i in range(self.n))


def test_each_rank_reads_parts_of_a_stream_that_has_enough_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(IterableDataset=Parts))
    monkeypatch.setattr(theirs, "is_datasets_available", lambda: True)
    for split, (world, rank) in product((False, True), RANKS):
        size = 2 * world if split else 2
        loader = DataLoader(Parts(5), batch_size=size)
        found = [[*prepared(lib, loader, world, rank, split_batches=split)] for lib in BOTH]
        assert [batch.tolist() for batch in found[0]] == [batch.tolist() for batch in found[1]]
        if world == 3 and not split:
            assert {int(x) // 10 for batch in found[0] for x in batch} == {rank}


@pytest.mark.parametrize(("split", "stream"), [*product((False, True), (False, True))])
def test_prepared_loaders_give_the_same_batches_and_attributes(split: bool, stream: bool) -> None:
    for (n, size, drop), (world, rank) in product(SIZES[::5], RANKS):
        size = size * world if split else size
        data: Any = SizedStream(range(n)) if stream else range(n)
        plain: Any = DataLoader(data, batch_size=size, drop_last=drop)
        loaders = [prepared(lib, plain, world, rank, split_batches=split) for lib in BOTH]
        found = [seen(loader) for loader in loaders]
        assert found[0] == found[1], (n, size, drop, world, rank)
        names = ("end_of_dataloader", "remainder", "iteration")
        states = [[getattr(loader, name) for name in names] for loader in loaders]
        assert states[0] == states[1], (n, size, drop, world, rank)
        if not stream:
            totals = [[loader.total_batch_size, loader.total_dataset_length] for loader in loaders]
            assert totals[0] == totals[1]


def test_shuffled_orders_are_the_same_for_the_same_seed() -> None:
    for seeded, (world, rank) in product((False, True), RANKS):
        orders = []
        for lib in BOTH:
            torch.manual_seed(3)
            plain: Any = DataLoader(range(11), batch_size=2, shuffle=True)  # type: ignore[arg-type]
            options = {"use_seedable_sampler": seeded, "data_seed": 5 if seeded else None}
            loader = prepared(lib, plain, world, rank, **options)
            orders.append([seen(loader), seen(loader)])
        assert orders[0] == orders[1], (seeded, world, rank)


def test_orders_after_a_pass_that_was_left_are_the_same() -> None:
    for n, left_after, (world, rank) in product((8, 11), range(1, 7), RANKS):
        orders = []
        for lib in BOTH:
            torch.manual_seed(3)
            plain: Any = DataLoader(range(n), batch_size=2, shuffle=True)  # type: ignore[arg-type]
            loader = prepared(lib, plain, world, rank)
            orders.append([[batch.tolist() for batch in islice(loader, left_after)], seen(loader)])
        assert orders[0] == orders[1], (n, left_after, world, rank)


def test_seedable_samplers_draw_the_same() -> None:
    orders = []
    for lib in BOTH:
        sampler = lib.SeedableRandomSampler(range(9), data_seed=4)
        orders.append([list(sampler), list(sampler), sampler.epoch])
        sampler.set_epoch(0)
        orders[-1].append(list(sampler))
    assert orders[0] == orders[1]


@pytest.mark.parametrize("skip", range(5))
def test_first_batches_are_left_out_alike(skip: int) -> None:
    batches = BatchSampler(SequentialSampler(range(9)), 2, drop_last=False)
    found = [seen(lib.SkipBatchSampler(batches, skip)) for lib in BOTH]
    assert found[0] == found[1]
    found = [seen(lib.SkipDataLoader(range(9), skip, batch_size=2)) for lib in BOTH]
    assert found[0] == found[1]
    for data in (range(9), SizedStream(range(9))):
        plain: Any = DataLoader(data, batch_size=2)  # type: ignore[arg-type]
        rest = [seen(lib.skip_first_batches(plain, skip))[0] for lib in BOTH]
        assert rest[0] == rest[1]
        rest = [
            [batch.tolist() for batch in lib.skip_first_batches(prepared(lib, plain, 2, 1), skip)]
            for lib in BOTH
        ]
        assert rest[0] == rest[1]


def test_what_cannot_be_split_is_a_value_error_in_both() -> None:
    loader: Any = DataLoader(range(9), batch_size=3)  # type: ignore[arg-type]
    for lib in BOTH:
        with pytest.raises(ValueError, match="multiple of"):
            lib.prepare_data_loader(loader, num_processes=2, process_index=0, split_batches=True)
        with pytest.raises(ValueError, match="put_on_device=True"):
            lib.prepare_data_loader(loader, dispatch_batches=True)


def test_each_pass_numbers_itself_for_the_sampler_of_a_shard() -> None:
    class Noting(SequentialSampler):
        def __init__(self) -> None:
            super().__init__(range(4))
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    found = []
    for lib in BOTH:
        sampler = Noting()
        shard = lib.BatchSamplerShard(BatchSampler(sampler, 2, drop_last=False), 2, 0)
        loader = lib.DataLoaderShard(range(4), batch_sampler=shard)
        _ = [*loader], [*loader]
        found.append(sorted(set(sampler.epochs)))
    assert found[0] == found[1]
