"""What prepared data loaders give to each of one, two and three real ranks (gloo)."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from itertools import chain, product
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from headway import Accelerator
from headway.data.configuration import DataLoaderConfiguration
from headway.data.loader import PreparedDataLoader
from headway.errors import UsageError
from headway.utils import set_seed
from tests.data.streams import SizedStream, StatefulStream, Stream
from tests.distributed.in_ranks import (
    RANK,
    WORLD,
    each_world,
    in_ranks,
    marks,
    of_all_ranks,
    with_ranks,
)
from tests.waiting import IS_LONG

pytestmark = marks(__name__)


Numbers: Any = range  # a data set that gives each index


class Batches:
    """Batches of the script's own sizes."""

    def __init__(self, *batches: list[int], batch_size: int | None = None) -> None:
        self.batches, self.batch_size = batches, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


BUCKETS: Any = Batches([0], [1, 2], [3, 4, 5], [6], [7, 8])


def batches_of(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def samples_of(loader: Any) -> list[Any]:
    return list(chain.from_iterable(batches_of(loader)))


@with_ranks(1, 3, long=(2,))
def test_loader_workers_lose_and_repeat_nothing() -> None:
    accelerator = Accelerator()
    for data in (Numbers(11), SizedStream(Numbers(11))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch advises on worker counts of small machines
            loader: Any = DataLoader(data, batch_size=2, num_workers=2, persistent_workers=True)
            loader = accelerator.prepare(loader)
            for turn in range(2):
                seen = []
                for batch in loader:
                    seen += accelerator.gather_for_metrics(batch).tolist()
                    if IS_LONG or (turn == 0 and len(seen) <= 2 * WORLD):
                        next(iter(loader))  # a look, by workers of its own
                assert sorted(seen) == list(range(11))
        assert (loader.num_workers, loader.batch_size, len(loader.dataset)) == (2, 2, 11)
        accelerator.free_memory()


@with_ranks(1, 3, long=(2,))
def test_ranks_whose_generators_differ_get_disjoint_shards_that_change_each_epoch() -> None:
    own, made = torch.Generator(), [DataLoaderConfiguration(), dispatching()]
    made.append(DataLoaderConfiguration(use_seedable_sampler=True))
    for config, generator in product(made, (None, own)):
        set_seed(RANK)
        own.manual_seed(RANK)
        loader: Any = DataLoader(Numbers(24), batch_size=2, shuffle=True, generator=generator)
        prepared = Accelerator(dataloader_config=config).prepare(loader)
        epochs = [of_all_ranks(samples_of(prepared)) for _ in range(2)]
        for parts in epochs:
            assert sorted(chain.from_iterable(parts)) == list(range(24))
        assert epochs[0] != epochs[1]
        assert loader.sampler.generator is generator


@in_ranks(1, 2, 3)
def order() -> list[int]:
    """The samples of all ranks, in order, with a seed."""
    accelerator = Accelerator()
    set_seed(5)
    loader = accelerator.prepare(DataLoader(Numbers(24), batch_size=2, shuffle=True))
    return samples_of(map(accelerator.gather, loader))


@each_world(3, long=(2,))
def test_one_seed_gives_one_order_of_samples_with_any_number_of_ranks(world: int) -> None:
    assert order(world)[0] == order(1)[0]


@with_ranks(1, 3, long=(2,))
def test_metrics_are_exact_in_uneven_rounds() -> None:
    """Also where batches in the middle of an epoch are shorter than their nominal size."""
    accelerator = Accelerator()
    short = Batches([0, 1], [2], [3, 4], [5, 6], [7], [8], batch_size=2)
    for sampler in (short, BUCKETS):
        loader = accelerator.prepare(DataLoader(Numbers(9), batch_sampler=sampler))
        seen = [accelerator.gather_for_metrics({"x": batch})["x"].tolist() for batch in loader]
        assert list(chain.from_iterable(seen)) == list(range(9))


@with_ranks(1, 3, long=(2,))
def test_metrics_are_exact_in_nested_rounds_and_for_any_accelerator() -> None:
    accelerator, other = Accelerator(), Accelerator()
    loader = accelerator.prepare(DataLoader(Numbers(9), batch_size=2))
    nested, of_other = [], []
    for batch in loader:
        for _ in loader:
            pass
        nested += accelerator.gather_for_metrics(batch).tolist()
        of_other += other.gather_for_metrics(batch).tolist()
    assert nested == of_other == list(range(9))


class Unlike(IterableDataset[Any]):
    """A stream that is another one on each rank."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        if self.kind == "samples":
            return iter(range(RANK, 12 + RANK))
        if self.kind == "tensors":
            return iter([torch.full((3,), float(RANK))] * 12)
        if self.kind == "later samples":
            return iter([*range(7), *range(100 * RANK, 100 * RANK + 12)])
        return iter(range(12 if RANK else 40))


@with_ranks(1, 3, long=(2,))
def test_streams_that_differ_between_ranks_are_refused_on_all_of_them() -> None:
    for kind in ("samples", "tensors", "later samples", "lengths"):
        loader = Accelerator().prepare(DataLoader(Unlike(kind), batch_size=2))
        if WORLD == 1:
            list(loader)
            continue
        with pytest.raises(UsageError) as refused:
            list(loader)
        said = str(refused.value)
        what = said.partition(" have different ")[2].partition(",")[0]
        assert what == ("lengths" if kind == "lengths" else "samples")
        assert "set_seed(...)" in said
        assert "already_sharded=True" in said


class OfRank:
    """A sampler that picks its samples by rank."""

    rank = RANK

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 16, WORLD))

    def __len__(self) -> int:
        return len(range(RANK, 16, WORLD))


class Draws(torch.utils.data.Dataset[float]):
    """Draws from a generator that nobody seeds."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return index + random.Random().random() / 2


@with_ranks(1, 3, long=(2,))
def test_data_that_differ_between_ranks_are_refused_and_random_ones_are_not() -> None:
    own = DataLoader(Numbers(100 * RANK, 100 * RANK + 8), 2)
    for workers in (0, 1):
        same: Any = DataLoader(Draws(), 2, num_workers=workers)
        found = of_all_ranks([int(sample) for sample in samples_of(Accelerator().prepare(same))])
        assert sorted(chain.from_iterable(found)) == [*range(12)]
    others = {"indices": DataLoader(Numbers(16), 2, sampler=OfRank()), "samples": own}
    others["lengths"] = DataLoader(Numbers(8 + RANK), 2)
    late: Any = [*range(7), 7 + RANK]
    later: Any = DataLoader(Numbers(16), 2, sampler=OfRank())
    for what, loader in (*others.items(), ("samples", DataLoader(late, 2)), ("indices", later)):
        prepared = Accelerator().prepare(loader)
        if loader is later:  # the ranks draw the same indices in the first epoch
            later.sampler.rank = 0
            list(prepared)
            later.sampler.rank = RANK
        if WORLD == 1:
            list(prepared)
            continue
        fix = r"in workers, pass Accelerator\(seed=.*already_sharded=True"
        with pytest.raises(UsageError, match=f"different {what}, .*\n.*\n.*{fix}"):
            list(prepared)


class Shards(StatefulStream):
    """A stream of shards that notes what it has read, as those of Hugging Face's `datasets`."""

    def __init__(self, shards: list[range]) -> None:
        super().__init__([*chain.from_iterable(shards)])
        self.shards = shards
        self.read: list[int] = []

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> Shards:
        return Shards(self.shards[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        for sample in super().__iter__():
            self.read.append(sample)
            yield sample


def sharded(kind: str) -> tuple[Accelerator, Any]:
    """Return a loader over 13 samples, of which each rank reads its own."""
    numbers = Numbers(13)
    own = Accelerator(dataloader_config=DataLoaderConfiguration(already_sharded=True))
    if kind == "a sampler of torch's":
        sampler: Any = DistributedSampler(numbers, WORLD, RANK, shuffle=False)
        return own, DataLoader(numbers, 2, sampler=sampler)
    if kind == "a part of a map data set":
        return own, DataLoader(numbers[RANK::WORLD], 2, shuffle=True)
    if kind == "a part of a stream":
        return own, DataLoader(Shards([numbers[RANK::WORLD]]), 2)
    if kind == "a part of a stream without a state":
        return own, DataLoader(Stream(numbers[RANK::WORLD]), 2)
    return Accelerator(), DataLoader(Shards([numbers[rank::WORLD] for rank in range(WORLD)]), 2)


@with_ranks(2)
def test_samplers_of_torch_that_draw_different_orders_are_refused() -> None:
    own = Accelerator(dataloader_config=DataLoaderConfiguration(already_sharded=True))
    first: Any = DistributedSampler(range(9), WORLD, rank=0)  # type: ignore[arg-type]
    wrapped = Batches(batch_size=2)
    wrapped.inner = first  # type: ignore[attr-defined]
    for options in ({"sampler": first}, {"batch_sampler": wrapped}):
        with pytest.raises(UsageError, match="with rank=0, so they read the same samples"):
            next(iter(own.prepare(DataLoader(range(9), **options))))  # type: ignore[arg-type]
    for is_shuffled in (False, True):
        sampler: Any = DistributedSampler(range(9), WORLD, RANK, shuffle=is_shuffled, seed=RANK)  # type: ignore[arg-type]
        loader = own.prepare(DataLoader(range(9), 2, sampler=sampler))  # type: ignore[arg-type]
        if not is_shuffled:
            assert len([*loader]) == 3, "the seed is unused"
            continue
        with pytest.raises(UsageError, match="DistributedSamplers have different seed="):
            next(iter(loader))


@with_ranks(1, 3, long=(2,))
def test_each_rank_reads_its_own_share_and_each_sample_counts_once() -> None:
    streams = "a part of a stream", "a part of a stream without a state", "shards"
    for kind in ("a sampler of torch's", "a part of a map data set", *streams):
        accelerator, loader = sharded(kind)
        set_seed(RANK)
        prepared = accelerator.prepare(loader)
        told: list[str] = []
        prepared.run.report = told.append
        for _ in range(2):
            own, counted = [], []
            for batch in prepared:
                own += batch.tolist()
                counted += accelerator.gather_for_metrics(batch).tolist()
            assert sorted(counted) == [*range(13)], kind
            assert len({*own} - {*range(RANK, 13, WORLD)}) <= ("torch" in kind), kind
        passes = iter(prepared)
        first = accelerator.gather_for_metrics(next(passes)).tolist()
        position = prepared.state_dict()
        rest = [x for batch in passes for x in accelerator.gather_for_metrics(batch).tolist()]
        assert sorted(first + rest) == [*range(13)], kind
        prepared.load_state_dict(position)
        resumed = (accelerator.gather_for_metrics(batch).tolist() for batch in prepared)
        assert [*chain.from_iterable(resumed)] == rest, kind
        assert not told, kind
        if kind == "shards":  # is read once in a pass, but for what the resumed one has read
            assert len(prepared.dataset.read) <= 4 * len(range(RANK, 13, WORLD))
    accelerator, _ = sharded("a part of a stream")
    for short, is_reported in ((4, False), (2, True), (1, False)):
        uneven: Any = DataLoader(Stream(range(6 if RANK == 0 else short)), 2)
        with redirect_stderr(StringIO()) as said:
            assert len([*accelerator.prepare(uneven)]) == 3
        note = "the data of ranks 1-2 have fewer batches than those of other ranks"
        assert (note in said.getvalue()) == (is_reported and RANK == 0 and WORLD == 3), said


class Turning(IterableDataset[int]):
    """A stream with its own order in each epoch, by its state or by its own generator."""

    def __init__(self, length: int) -> None:
        self.length, self.at, self.epoch = length, 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.length:
            self.at += 1
            yield self.at + 10 * self.epoch
        self.at, self.epoch = 0, self.epoch + 1


class Positioned(Turning):
    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class Drawing(Turning):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.own = random.Random(1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.own.sample(range(99), self.length))


@with_ranks(3)
def test_a_rank_that_has_run_out_of_data_repeats_the_same_batch_after_a_resume() -> None:
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(already_sharded=True, split_streams=False)
    )
    for kind in (Positioned, Drawing):
        loader = accelerator.prepare(DataLoader(kind(6 if RANK == 0 else 2), 2))
        samples_of(loader)
        seen, positions = [], []
        for batch in loader:
            seen.append(batch.tolist())
            positions.append(loader.state_dict())
        following = batches_of(loader)
        resumed = accelerator.prepare(DataLoader(kind(6 if RANK == 0 else 2), 2))
        resumed.load_state_dict(positions[1])
        told: list[str] = []
        resumed.run.report = told.append
        assert batches_of(resumed) == seen[2:], kind
        assert not told, kind
        assert batches_of(resumed) == following, kind


class Streamed:
    """Iterates over batches, and is no DataLoader."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for first in range(0, 10, 2):
            yield {"x": torch.arange(first, first + 2) + 100 * RANK, "name": f"from {RANK}"}


def dispatching() -> DataLoaderConfiguration:
    return DataLoaderConfiguration(dispatch_batches=True)


@with_ranks(1, 3, long=(2,))
def test_rank_0_reads_for_all_where_batches_are_dispatched() -> None:
    accelerator = Accelerator(dataloader_config=dispatching())
    ready = [[i, i + 1] for i in range(0, 10, 2)]
    last = ready[len(ready) // WORLD * WORLD :]
    ready += last[: -len(ready) % WORLD]  # each rank gets one in the last round
    own = PreparedDataLoader(Streamed(), RANK, WORLD, device=accelerator.device)
    found = [(batch["name"], batch["x"].tolist()) for batch in own]
    assert found == [("from 0", batch) for batch in ready[RANK::WORLD]]
    unlike = accelerator.prepare(DataLoader(Unlike("samples"), batch_size=2))
    assert batches_of(unlike) == [[i, i + 1] for i in range(0, 12, 2)][RANK::WORLD]


@with_ranks(1, 3, long=(2,))
def test_dispatched_batches_of_texts_are_gathered_and_skipped() -> None:
    accelerator = Accelerator(dataloader_config=dispatching())
    texts = DataLoader(Numbers(7), batch_size=2, collate_fn=lambda rows: [str(row) for row in rows])
    seen = [accelerator.gather_for_metrics(batch) for batch in accelerator.prepare(texts)]
    assert list(chain.from_iterable(seen)) == [str(i) for i in range(7)]
    skipped = accelerator.skip_first_batches(accelerator.prepare(texts), 1)
    assert len(skipped) == len(list(skipped)) == -(-4 // WORLD) - 1
