"""With a seed, a sample's random numbers follow from the epoch and its index, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from headway import Accelerator  # noqa: E402
from headway.data.configuration import DataLoaderConfiguration  # noqa: E402
from headway.data.generators import mixed, restore_states, snapshot  # noqa: E402
from headway.data.loader import PreparedDataLoader, skip_first_batches  # noqa: E402
from headway.errors import CheckpointError, UsageError  # noqa: E402

SIZE = 13


def noise() -> list[float]:
    return [torch.rand(()).item(), random.random(), np.random.rand()]


class Augmented(Dataset[list[float]]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), *noise()]


class Lists(Augmented):
    def __getitems__(self, indices: list[int]) -> list[list[float]]:
        return [self[index] for index in indices]


class Pairs(Augmented):
    """Loads several samples at once."""

    def __getitem__(self, indices: Any) -> list[Any]:
        return [indices, len(indices)]


class Stream(IterableDataset[list[float]]):
    def __iter__(self) -> Iterator[list[float]]:
        for index in range(SIZE):
            yield [float(index), *noise()]


def rows(batch: Any) -> list[list[float]]:
    return [list(map(float, row)) for row in zip(*batch, strict=True)]


def epochs(
    world: int, num_epochs: int = 2, seed: int = 5, **options: Any
) -> list[dict[float, Any]]:
    """Return for each epoch what each sample is, on whatever rank it was loaded."""
    options = {"dataset": Augmented(), "batch_size": 3, **options}
    if "batch_sampler" in options:
        del options["batch_size"]
    ranks = [PreparedDataLoader(DataLoader(**options), r, world, seed=seed) for r in range(world)]
    seen = []
    for _ in range(num_epochs):
        noise()
        batches = chain.from_iterable(list(loader) for loader in ranks)
        seen.append({row[0]: row[1:] for batch in batches for row in rows(batch)})
    return seen


def test_a_sample_is_the_same_on_any_rank_and_new_in_each_epoch() -> None:
    alone = epochs(1)
    assert epochs(2, batch_size=5) == alone
    assert epochs(3, shuffle=True) == epochs(1, shuffle=True)
    assert alone[0].keys() == alone[1].keys()
    values = list(chain.from_iterable(chain(*alone[0].values(), *alone[1].values()) for _ in "x"))
    assert len(set(values)) == 2 * SIZE * 3
    assert epochs(1, seed=6) != alone
    own = DataLoaderConfiguration(already_sharded=True)
    loaders = [
        PreparedDataLoader(DataLoader(Augmented()), r, 2, seed=5, config=own) for r in (0, 1)
    ]
    first, second = (rows(next(iter(loader))) for loader in loaders)
    assert first != second, "the first sample of each rank's own data"


@pytest.mark.processes
def test_a_sample_is_the_same_in_workers_that_end_or_stay() -> None:
    alone = epochs(1)
    assert epochs(1, num_workers=2) == alone
    assert epochs(2, num_workers=1, persistent_workers=True) == alone


def test_nested_data_sets_and_those_that_load_lists_are_seeded_sample_by_sample() -> None:
    alone = epochs(1)
    for dataset in (Lists(), Subset(Lists(), range(SIZE)), Subset(Augmented(), range(SIZE))):
        assert epochs(2, dataset=dataset) == alone
    halves: Any = ConcatDataset(
        [Subset(Augmented(), range(6)), Subset(Augmented(), range(6, SIZE))]
    )
    assert epochs(1, dataset=halves) == alone


def test_batch_samplers_and_single_samples_are_seeded() -> None:
    alone = epochs(1)
    batches = [[0, 1], [2, 3, 4], [5], [6, 7, 8, 9], [10, 11, 12]]
    assert epochs(2, batch_sampler=batches) == alone
    one_by_one = PreparedDataLoader(DataLoader(Augmented(), batch_size=None), 1, 2, seed=5)
    assert {row[0]: row[1:] for row in one_by_one}[3] == alone[0][3]
    pairs = BatchSampler(SequentialSampler(range(4)), 2, False)
    loader = DataLoader(Pairs(), batch_size=None, sampler=pairs)
    assert {tuple(pair) for pair, _ in PreparedDataLoader(loader, seed=5)} == {(0, 1), (2, 3)}
    loader = DataLoader(Pairs(), batch_size=2, sampler=pairs, collate_fn=list)
    assert list(PreparedDataLoader(loader, seed=5)) == [[[[0, 1], 2], [[2, 3], 2]]]


def test_a_sample_that_an_epoch_draws_again_is_another_one() -> None:
    def drawn(world: int, skip: int = 0) -> list[Any]:
        sampler = WeightedRandomSampler([1.0] * SIZE, 30)
        loader = DataLoader(Augmented(), batch_size=3, sampler=sampler)
        ranks = [PreparedDataLoader(loader, rank, world, seed=5) for rank in range(world)]
        return [
            tuple(row)
            for rank in ranks
            for batch in skip_first_batches(rank, skip)
            for row in rows(batch)
        ]

    alone = drawn(1)
    assert len({row[0] for row in alone}) < 20
    assert len(set(alone)) == 30
    assert sorted(drawn(2)) == sorted(alone)
    assert drawn(1, skip=4) == alone[12:]


def test_the_generators_of_the_main_process_are_put_back() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = noise()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    for batch in PreparedDataLoader(DataLoader(Augmented(), generator=torch.Generator()), seed=5):
        assert batch
    assert noise() == expected


class Masked:
    """A collate function that draws."""

    def __call__(self, samples: list[list[float]]) -> list[Any]:
        return [*torch.tensor(samples).T, torch.rand(len(samples))]


def test_a_snapshot_has_the_words_of_pythons_generator_and_the_normal_number_that_it_keeps() -> (
    None
):
    random.seed(5)
    random.gauss()  # which keeps a second number for the next call
    drawn, before = random.getstate(), snapshot()
    assert snapshot() == before
    random.gauss()
    assert snapshot() != before, "the number that was kept is gone"
    random.random()
    restore_states(before)
    assert (random.getstate(), snapshot()) == (drawn, before)


@pytest.mark.processes
def test_what_a_collate_function_draws_follows_from_its_batch() -> None:
    alone = epochs(1, collate_fn=Masked())
    assert epochs(1, collate_fn=Masked(), num_workers=1) == alone
    assert alone[0] != alone[1]


@pytest.mark.processes
def test_items_of_a_stream_are_seeded_by_their_number() -> None:
    alone = epochs(1, dataset=Stream())
    assert epochs(2, dataset=Stream()) == alone
    assert epochs(1, dataset=Stream(), num_workers=1, persistent_workers=True) == alone
    assert len({tuple(row) for ranks in alone for row in ranks.values()}) == 2 * SIZE


class Shuffled(IterableDataset[list[float]]):
    """A stream that draws its order from global generators when it begins, and can go on."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[list[float]]:
        return self._in_order(torch.randperm(SIZE).tolist())

    def _in_order(self, order: list[int]) -> Iterator[list[float]]:
        while self.given < SIZE:
            self.given += 1
            yield [float(order[self.given - 1]), *noise()]
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def test_a_stream_goes_on_with_the_same_random_numbers() -> None:
    def of(loader: Any) -> list[Any]:
        return [rows(batch) for batch in loader]

    whole = of(PreparedDataLoader(DataLoader(Shuffled(), batch_size=3), seed=5))
    begun = PreparedDataLoader(DataLoader(Shuffled(), batch_size=3), seed=5)
    for _ in zip(range(2), begun, strict=False):
        position = begun.state_dict()
    noise()
    other = PreparedDataLoader(DataLoader(Shuffled(), batch_size=3), seed=5)
    other.require_position(position, "here")
    other.seek(position)
    assert of(other) == whole[2:]


def test_another_seed_cannot_go_on_in_the_middle_of_an_epoch() -> None:
    loader = PreparedDataLoader(DataLoader(Augmented()), seed=5)
    for _ in loader:
        position = loader.state_dict()
        with pytest.raises(CheckpointError, match=r"seed is 6 in this run and 5"):
            PreparedDataLoader(DataLoader(Augmented()), seed=6).require_position(position, "here")
        break


class Opened(Augmented):
    """A data set that each worker opens for itself."""

    path = "closed"

    def __getitem__(self, index: int) -> list[float]:
        return [float(self.path == "open")]


def open_in_worker(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.path = "open"


@pytest.mark.processes
def test_workers_reach_the_data_set_itself() -> None:
    loader = DataLoader(Opened(), num_workers=1, worker_init_fn=open_in_worker)
    assert {float(batch[0]) for batch in PreparedDataLoader(loader, seed=5)} == {1.0}


def test_the_accelerator_seeds_models_orders_and_samples() -> None:
    def run(**options: Any) -> tuple[list[float], list[Any]]:
        noise()
        accelerator = Accelerator(cpu=True, **options)
        weights = torch.nn.Linear(1, 1).weight.tolist()
        order = [
            rows(batch) for batch in accelerator.prepare(DataLoader(Augmented(), shuffle=True))
        ]
        return weights, order

    assert run(seed=5) == run(seed=5)
    assert run(seed=5) != run(seed=6)
    other = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
    (_, order), (_, seeded) = run(seed=5, dataloader_config=other), run(seed=5)
    assert order != seeded
    assert [batch[0][1:] for batch in order] == [batch[0][1:] for batch in seeded]


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True, "1"])
def test_a_seed_that_no_generator_takes_is_refused(seed: Any) -> None:
    with pytest.raises(UsageError, match=r"seed is|for seed: must be"):
        Accelerator(cpu=True, seed=seed)


def test_other_numbers_or_another_order_of_them_are_another_seed() -> None:
    assert len({mixed(1, 12), mixed(12, 1), mixed(11, 2)}) == 3
