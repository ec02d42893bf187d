"""A training that is cut goes on with the batches and random numbers of one that is not."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from headway.data.loader import PreparedDataLoader
from headway.data.loader_set import LoaderSet
from headway.distributed.rng import generator_states, set_generator_states
from headway.ipc.progress import Progress
from headway.utils import DataLoaderConfiguration, set_seed
from tests.data.streams import StatefulStream, Stream

CPU = torch.device("cpu")
SAMPLES, SIZE, EPOCHS = 12, 3, 3
NUMBERS: Any = range(SAMPLES)
Drawn = list[tuple[Any, ...]]


class Augmented(Dataset[Any]):
    """Draws from all generators for each sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(1), random.random(), np.random.rand()


class Drawing(StatefulStream):
    """Continues where its state says, and draws for each sample."""

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            yield sample, torch.rand(1), random.random()


class Counted(StatefulStream):
    """A stream whose epochs begin by their number, and not by the state of the one before."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.at = epoch, 0

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            yield sample, 100 * self.epoch


class Shuffling(IterableDataset[int]):
    """A stream without state, in an order that its own generators draw in each pass."""

    def __init__(self) -> None:
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)

    def __iter__(self) -> Iterator[int]:
        order = [*range(SAMPLES)]
        self.python.shuffle(order)
        return (index + int(self.numpy.integers(99)) for index in order)


class OwnBatches:
    """A batch sampler that draws from torch's generator, or from Python's."""

    def __init__(self, of_python: bool = False) -> None:
        self.of_python = of_python

    def __len__(self) -> int:
        return SAMPLES // SIZE

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        if self.of_python:
            random.shuffle(order)
        yield from (order[i : i + SIZE] for i in range(0, SAMPLES, SIZE))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def augmented(**options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), SIZE, **(options or {"shuffle": True}))


def numbers(size: int = SIZE, **options: Any) -> DataLoader[Any]:
    return DataLoader(NUMBERS, size, shuffle=True, **options)


def shared() -> list[DataLoader[Any]]:
    generator = seeded()
    return [augmented(shuffle=True, generator=generator), numbers(generator=generator)]


WORKERS: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
LOADERS: dict[str, Callable[[], list[DataLoader[Any]]]] = {
    "shuffled": lambda: [augmented()],
    "own generator": lambda: [augmented(shuffle=True, generator=seeded())],
    "two with one generator": shared,
    "draws while it goes on": lambda: [
        augmented(
            sampler=RandomSampler(NUMBERS, replacement=True, num_samples=40, generator=seeded())
        )
    ],
    "weighted": lambda: [augmented(sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))],
    "own batches": lambda: [DataLoader(Augmented(), batch_sampler=OwnBatches(of_python=True))],
    "single samples": lambda: [DataLoader(Augmented(), batch_size=None, shuffle=True)],
    "stream": lambda: [DataLoader(Drawing(NUMBERS), SIZE)],
    "stream with set_epoch": lambda: [DataLoader(Counted(NUMBERS), SIZE)],
    "stream with generators": lambda: [DataLoader(Shuffling(), SIZE)],
    "two": lambda: [augmented(), numbers(2)],
    "seedable": lambda: [augmented()],
    "workers": lambda: [numbers(num_workers=1)],
    "lasting workers": lambda: [numbers(**WORKERS)],
    "lasting workers, own generator": lambda: [numbers(generator=seeded(), **WORKERS)],
    "lasting workers, own batches": lambda: [
        DataLoader(NUMBERS, batch_sampler=OwnBatches(), **WORKERS)
    ],
    "two, of lasting workers": lambda: [augmented(), numbers(2, **WORKERS)],
    "a stream of lasting workers": lambda: [augmented(), DataLoader(Stream(NUMBERS), 2, **WORKERS)],
}


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def steps(first: Any, *others: Any) -> Iterator[list[Any]]:
    """Yield the batches of each step: those of a second loader, whose passes end elsewhere, too."""
    endless_others = [endless(other) for other in others]
    for _ in range(first.epoch, EPOCHS):
        for batch in first:
            yield [batch, *(next(batches) for batches in endless_others)]


def zipped(first: Any, longer: Any) -> Iterator[list[Any]]:
    """Yield the batches of each step of loops that leave every pass of the second loader early."""
    for _ in range(first.epoch, EPOCHS):
        for batches in zip(first, longer, strict=False):
            yield [*batches]


def broken(loader: Any, epochs: Iterable[int] = range(EPOCHS)) -> Iterator[list[Any]]:
    """Yield the batches of short epochs, and of whole ones where they are not to be short."""
    for _ in range(loader.epoch, EPOCHS):
        for number, batch in enumerate(loader, 1):
            yield [batch]
            if number == 2 and loader.epoch in epochs:
                break


def looked_at(loader: Any) -> Iterator[list[Any]]:
    """Yield the batches of whole epochs, after the first batch was looked at twice."""
    if not loader.epochs.has_trained:
        next(iter(loader)), next(iter(loader))
    yield from whole_epochs(loader)


def whole_epochs(loader: Any, *others: Any) -> Iterator[list[Any]]:
    for _ in range(loader.epoch, EPOCHS):
        yield from ([batch] for batch in loader)


def evaluated_first(loader: Any, *others: Any) -> Iterator[list[Any]]:
    """Yield the batches of whole epochs, after each run has looked at one and read the others."""
    _ = next(iter(loader)), [[*other] for other in others]
    yield from whole_epochs(loader)


def looked_at_and_kept(loader: Any) -> Iterator[list[Any]]:
    """Yield the batches of whole epochs, after each run has begun a pass that it does not end."""
    kept = iter(loader)
    next(kept)
    for batches in whole_epochs(loader):
        yield [*batches, next(iter(loader))]


def looked_at_before_each_epoch(loader: Any) -> Iterator[list[Any]]:
    for _ in range(loader.epoch, EPOCHS):
        next(iter(loader))
        yield from ([batch] for batch in loader)


def looked_at_in_the_loop(loader: Any, *others: Any) -> Iterator[list[Any]]:
    """Yield batches of whole epochs, with others that are looked at in the middle of each step."""
    for batches in whole_epochs(loader):
        yield [*batches, *(next(iter(other)) for other in (loader, *others))]


def evaluated_in_the_loop(loader: Any, other: Any) -> Iterator[list[Any]]:
    for batches in whole_epochs(loader):
        yield [*batches, *(other if batches[0][0][0] % 2 else ())]


def evaluated_before_each_epoch(loader: Any, other: Any) -> Iterator[list[Any]]:
    """Yield the batches of whole epochs; what is drawn before and after them is part of these."""
    for _ in range(loader.epoch, EPOCHS):
        evaluated = [*other, torch.rand(1)]
        for batch in loader:
            yield [batch]
        evaluated = [*other, torch.rand(1)]
        assert evaluated


def a_pass_for_each_step(loader: Any) -> Iterator[list[Any]]:
    for _ in range(loader.epoch, 6):
        yield [next(iter(loader))]


def epochs_of(*loaders: Any) -> Iterator[int]:
    run: LoaderSet = loaders[0].run
    return run.count_epochs(EPOCHS, [loader.epochs for loader in loaders])


def one_after_the_other(*loaders: Any) -> Iterator[list[Any]]:
    for _ in epochs_of(*loaders):
        yield from ([batch] for loader in loaders for batch in loader)


def with_an_iterator_of_each_epoch(first: Any, longer: Any) -> Iterator[list[Any]]:
    """Yield batches of two loaders; the passes over the second are left open, and not resumed."""
    for _ in epochs_of(first, longer):
        others = iter(longer)
        yield from ([batch, next(others)] for batch in first)


Loop = Callable[..., Iterator[list[Any]]]


class Cut(Exception):
    """The end of a run, once a checkpoint is taken."""


def trained(
    loaders: list[Any], cut_after: int | None = None, loop: Loop = steps
) -> tuple[Drawn, bytes]:
    """Return what is given and drawn at each step; and a checkpoint that is due after one."""
    drawn: Drawn = []
    saved: list[bytes] = []
    run = loaders[0].run

    def take() -> None:
        saved.append(checkpoint_of(loaders))
        raise Cut

    try:
        for batches in loop(*loaders):
            drawn.append((repr(batches), torch.rand(1).item(), random.random()))
            run.progress.num_trained += 1  # as an optimizer does
            is_due = cut_after is not None and len(drawn) >= cut_after
            is_marked = is_due and run.checkpoint.schedule(take)
            torch.rand(1), np.random.rand()  # what follows in the body of the loop
            if is_due and not is_marked:
                take()  # outside of a loop over a loader
        run.checkpoint.save()
    except Cut:
        pass
    return drawn, saved[0] if saved else b""


def checkpoint_of(loaders: list[Any]) -> bytes:
    positions = [loader.state_dict() for loader in loaders]
    counted = loaders[0].run.counted_epochs([loader.epochs for loader in loaders])
    return pickle.dumps((positions, counted, generator_states(CPU)))


def prepared(kind: str) -> list[PreparedDataLoader]:
    config = DataLoaderConfiguration(use_seedable_sampler=kind == "seedable")
    run = LoaderSet(Progress())
    run.counts_training = True
    return [
        PreparedDataLoader(loader, config=config, run=run, number=number)
        for number, loader in enumerate(LOADERS[kind]())
    ]


def resumed(kind: str, checkpoint: bytes) -> list[PreparedDataLoader]:
    set_seed(99)  # another process
    loaders = prepared(kind)
    positions, counted, states = pickle.loads(checkpoint)
    for loader, position in zip(loaders, positions, strict=True):
        loader.require_position(position, "")
        loader.seek(position)
    loaders[0].run.resume(lambda: set_generator_states(states, CPU), counted, has_trained=True)
    return loaders


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOADERS)
def test_batches_and_random_numbers_are_those_of_a_run_that_is_not_cut(kind: str) -> None:
    set_seed(1)
    whole, _ = trained(prepared(kind))
    states = generator_states(CPU)
    every = 5 if "workers" in kind else 1
    for step in range(1, len(whole), every):
        set_seed(1)
        before, checkpoint = trained(prepared(kind), step)
        at = len(before)  # a step later where another loader is at its end
        assert before == whole[:at], step
        assert at - step <= (len(LOADERS[kind]()) > 1), step
        after, again = trained(resumed(kind, checkpoint), 1)  # and is cut once more
        assert after == whole[at : at + len(after)], step
        if at + len(after) < len(whole):
            rest, _ = trained(resumed(kind, again))
            assert rest == whole[at + len(after) :], step
            assert repr(generator_states(CPU)) == repr(states), step


@pytest.mark.parametrize(
    ("kind", "loop", "cuts"),
    [
        ("two", zipped, range(1, 12)),
        pytest.param("two, of lasting workers", zipped, (5, 8), marks=pytest.mark.processes),
        ("shuffled", broken, (2, 4)),  # its count begins anew in the middle of an epoch
        ("shuffled", looked_at, range(1, 12)),
        ("own generator", evaluated_first, range(1, 12)),
        pytest.param("lasting workers", evaluated_first, (2, 4), marks=pytest.mark.processes),
        ("stream", evaluated_first, (1, 3)),
        ("two with one generator", evaluated_first, range(1, 12)),
        ("own generator", looked_at_and_kept, range(1, 12)),
        ("shuffled", looked_at_before_each_epoch, (1, 2, 3, 5, 6, 7, 9, 10, 11)),
        ("two", evaluated_before_each_epoch, range(1, 12)),
        ("shuffled", a_pass_for_each_step, range(1, 6)),
        ("two", looked_at_in_the_loop, range(1, 12)),
        ("stream", looked_at_in_the_loop, range(1, 12)),
        ("two", evaluated_in_the_loop, range(1, 12)),
        ("shuffled", partial(broken, epochs=[0]), range(3, 10)),
        ("two", one_after_the_other, range(1, 30, 2)),
        ("two", with_an_iterator_of_each_epoch, range(1, 12)),
    ],
)
def test_a_pass_is_over_where_those_before_were_left_and_goes_on_where_one_was(
    kind: str, loop: Loop, cuts: Iterable[int]
) -> None:
    set_seed(1)
    whole, _ = trained(prepared(kind), loop=loop)
    for step in cuts:
        set_seed(1)
        begun, checkpoint = trained(prepared(kind), step, loop)
        assert len(begun) - step <= 1
        again = checkpoint_of(resumed(kind, checkpoint))  # of a run that is cut at once
        rest, _ = trained(resumed(kind, again), loop=loop)
        assert rest == whole[len(begun) :], step


def test_looks_are_no_epochs_and_none_that_is_kept_goes_on_after_the_loop() -> None:
    (loader,) = prepared("shuffled")
    next(iter(loader))
    kept = iter(loader)
    next(kept)
    assert loader.epoch == 0
    for _ in loader:
        loader.run.progress.num_trained += 1
    assert (loader.epoch, loader.epochs.samples) == (1, SAMPLES)
    assert loader.state_dict()["place"][:2] == [1, 0]


class Worn(Drawing):
    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"] + 1


@pytest.mark.parametrize(("stream", "told"), [(Drawing, 0), (Worn, 1)])
def test_a_look_reads_what_follows_and_moves_no_stream(
    stream: type[Drawing], told: int, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = PreparedDataLoader(DataLoader(stream(NUMBERS), SIZE), run=LoaderSet(Progress()))
    loader.run.counts_training = True
    passes = [(batch[0].tolist(), next(iter(loader), [None])[0]) for batch in loader]
    assert capsys.readouterr().err.count("did not restore its state") == told
    if not told:
        read, looks = zip(*passes, strict=True)
        assert [*read] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
        assert [look.tolist() for look in looks] == [*read[1:], read[0]]


def test_a_look_within_a_pass_over_a_stream_with_generators_is_reported(capsys: Any) -> None:
    (loader,) = prepared("stream with generators")
    assert [next(iter(loader)) for _ in loader]
    assert "has no state_dict()" in capsys.readouterr().err
