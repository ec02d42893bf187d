"""The order of epochs, where a checkpoint lies, and what is reported because it is not exact."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from headway import Accelerator
from headway.checkpoint.manifest import read_manifest
from headway.compat import Accelerator as CompatAccelerator
from headway.data.loader import PreparedDataLoader
from headway.data.loader_set import LoaderSet
from headway.errors import UsageError
from headway.ipc.progress import Progress
from headway.utils import ProjectConfiguration, set_seed
from tests.data.streams import StatefulStream


class Lazy:
    """A sampler that draws from Python's generator for each sample."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return (random.randrange(12) for _ in range(12))


class Stateful(Lazy):
    """A sampler whose order depends on how often it was asked for one."""

    turn = 0

    def __iter__(self) -> Iterator[int]:
        self.turn += 1
        return iter([(7 * i + self.turn) % 12 for i in range(12)])


def prepared(rank: int = 0, world: int = 1, **options: Any) -> PreparedDataLoader:
    loader: Any = DataLoader(range(12), 2, **(options or {"shuffle": True}))  # type: ignore[arg-type]
    return PreparedDataLoader(loader, rank, world, run=LoaderSet(Progress()))


def trained(loader: PreparedDataLoader, between: Callable[[], object] = int) -> list[int]:
    """Return the samples of an epoch, with something that the script does in each step."""
    seen = []
    for batch in loader:
        seen += batch.tolist()
        between()
        loader.run.progress.num_trained += 1
    return seen


class Own(Lazy):
    """A sampler that draws from a generator of its own."""

    def __init__(self, own: torch.Generator) -> None:
        self.own = own

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(12, generator=self.own).tolist())


@pytest.mark.parametrize(
    "options_of",
    [
        lambda own: {"shuffle": True, "generator": own},
        lambda own: {"sampler": torch.utils.data.RandomSampler(range(12), generator=own)},
        lambda own: {"sampler": Own(own)},
    ],
)
def test_with_a_generator_of_its_own_a_loader_repeats_all_epochs(options_of: Any) -> None:
    orders = []
    for number in range(2):
        torch.manual_seed(number)
        np.random.seed(number)
        loader = prepared(**options_of(torch.Generator().manual_seed(5)))
        orders.append([trained(loader) for _ in range(3)])
    assert orders[0] == orders[1]
    assert orders[0][1] != orders[0][2]


def test_the_first_epoch_is_that_of_torch_and_so_are_the_generators_after_it() -> None:
    own = torch.Generator()
    for options in (
        {"shuffle": True},
        {"shuffle": True, "generator": own},
        {"sampler": torch.utils.data.WeightedRandomSampler([1.0] * 12, 12)},
        {"sampler": torch.utils.data.RandomSampler(range(12), True, 80, own)},
    ):
        plain: Any = DataLoader(range(12), 2, **options)  # type: ignore[arg-type]
        found = []
        for loader in (plain, PreparedDataLoader(plain)):
            set_seed(3)
            own.manual_seed(3)
            samples = [*chain(*(batch.tolist() for batch in loader))]
            found.append((samples, torch.rand(1), torch.rand(1, generator=own)))
        assert found[0] == found[1]


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": Lazy()}], ids=["torch", "own"])
def test_no_draw_look_or_evaluation_changes_a_later_epoch(options: dict[str, Any]) -> None:
    set_seed(3)
    loader = prepared(**options)
    expected = [trained(loader) for _ in range(3)]
    assert expected[0] != expected[1] != expected[2]
    set_seed(3)
    loader = prepared(**options)
    looks = lambda: (torch.rand(1), random.random(), next(iter(loader)), [*loader])  # noqa: E731
    found = [trained(loader, looks) for _ in range(3)]
    assert found == expected
    before = torch.get_rng_state()
    trained(loader)
    assert torch.equal(torch.get_rng_state(), before), "a later epoch draws nothing of the script's"


def test_new_iterators_over_a_loader_without_a_loop_of_its_own_yield_new_batches() -> None:
    set_seed(3)
    loader = prepared()
    loader.run.counts_training = True
    other: Any = PreparedDataLoader(DataLoader(range(99), 1, shuffle=True), run=loader.run)  # type: ignore[arg-type]
    others: list[int] = []
    for _ in range(3):  # such as an unlabelled batch in each step
        trained(loader, lambda: others.append(next(iter(other)).item()))
    with torch.no_grad():
        others += [next(iter(other)).item() for _ in range(20)]
    assert len({*others}) > 20


class Positioned(StatefulStream):
    """A stream that continues where its state says, in an order of each epoch."""

    epoch = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for sample in super().__iter__():
            yield sample + 10 * self.epoch
        self.epoch += 1

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, **super().state_dict()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.epoch = state["epoch"]


def saved_after_each_epoch(
    folder: Path, seed: int, stop: int = -1, *, twice: bool, saves: bool
) -> list[Any]:
    """Train, also with what is drawn before the loop, and crash at the end of an epoch."""
    set_seed(seed)
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=saves)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    samples: Any = torch.arange(6.0 if twice else 8.0)[:, None]
    data = DataLoader(Positioned(samples) if twice else samples, 2, shuffle=not twice)
    model, optimizer, schedule, loader = accelerator.prepare(
        model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), data
    )
    run, seen = accelerator.resume(), []
    for epoch in run.epochs(4) if twice else range(run.epoch, 4):
        loader.set_epoch(epoch)
        factor = random.random()
        batches = [*loader]
        for batch in chain(loader, loader) if twice else loader:
            accelerator.backward(factor * model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            batches.append(batch)
        schedule.step()
        seen.append((epoch, factor, str(batches), schedule.get_last_lr()))
        if saves:
            accelerator.save_state()
        if epoch == stop:
            accelerator.parts.preemption.release()
            return seen
        if not saves:
            accelerator.checkpoint()
    accelerator.end_training()
    return seen


@pytest.mark.parametrize(("twice", "saves"), [(False, False), (True, False), (True, True)])
def test_a_run_resumes_between_two_epochs_with_what_is_drawn_before_their_loops(
    twice: bool, saves: bool, tmp_path: Path
) -> None:
    train = partial(saved_after_each_epoch, twice=twice, saves=saves)
    whole = train(tmp_path / "whole", 1)
    for stop in (1, 3):
        begun = train(tmp_path / str(stop), 1, stop)
        rest = train(tmp_path / str(stop), 2)
        assert begun[: stop + saves] + rest == whole


class Cut(Exception):
    """A crash, after which the run is started again."""


class Script:
    """What loops of a script use; `seen` has the samples of each backward pass or step."""

    def __init__(self, folder: Path, seed: int, *, over: str, saves: bool, stop: int) -> None:
        set_seed(seed)
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=saves)
        self.accelerator = Accelerator(cpu=True, project_config=project)
        data: Any = torch.arange(10.0)[:, None]
        model = torch.nn.Linear(1, 1)
        self.plain = DataLoader(data, 2, shuffle=True)
        self.model, self.optimizer, self.loader, self.other = self.accelerator.prepare(
            *(model, torch.optim.SGD(model.parameters(), lr=1e-3)),
            *(DataLoader(data[:size], 2, shuffle=True) for size in (10, 6)),
        )
        self.run = self.accelerator.resume()
        self.over, self.stop, self.seen = over, stop, list[str]()
        self.save = self.accelerator.save_state if saves else self.accelerator.checkpoint

    def epochs(self) -> Any:
        return self.run.epochs(3) if self.over == "epochs" else range(self.run.epoch, 3)

    def backward(self, *batches: torch.Tensor) -> None:
        self.accelerator.backward(self.model(torch.cat(batches)).square().mean())
        self.seen.append(str(batches))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen[-1] += " step"
        if self.optimizer.step_count == self.stop:
            raise Cut


def with_other(script: Script, is_kept: bool) -> None:
    """Train with a batch of a second loader in each step, from one iterator or one per epoch."""
    others = iter(script.other)
    for _ in script.epochs():
        others = others if is_kept else iter(script.other)
        for batch in script.loader:
            if (more := next(others, None)) is None:
                others = iter(script.other)
                more = next(others)
            script.backward(batch, more)
            script.step()
        script.save()


def in_turns(script: Script) -> None:
    """Train with the loaders alternately until one is exhausted, and save in its last batch."""
    for _ in script.epochs():
        loops = [iter(script.loader), iter(script.other)]
        for number in range(99):
            if (batch := next(loops[number % 2], None)) is None:
                break
            script.backward(batch)
            script.step()
            if number == 5:
                script.save()


def by_hand(script: Script, saves_at: int, *, ends_stepped: bool = True) -> None:
    """Accumulate two batches; save after one of them."""
    for _ in script.epochs():
        for number, batch in enumerate(script.loader):
            script.backward(batch)
            if number % 2 or (ends_stepped and number + 1 == len(script.loader)):
                script.step()
            if number == saves_at:
                script.save()


def without_loader(script: Script) -> None:
    for _ in script.epochs():
        for batch in script.plain:
            script.backward(batch)
            script.step()
            script.accelerator.checkpoint(every=1)


NO_NOTE = ""
NEW_ITERATOR, COUNTED = "trained with a new iterator", "gradients were accumulated over other"


@pytest.mark.parametrize(
    ("loop", "over", "saves", "stop", "note"),
    [
        *(
            (partial(with_other, is_kept=is_kept), over, saves, stop, note)
            for is_kept in (True, False)
            for over in ("range", "epochs")
            for saves in (True, False)
            for stop in (7, 12)
            for note in (NEW_ITERATOR if saves and not is_kept else NO_NOTE,)
        ),
        (in_turns, "range", True, 8, NEW_ITERATOR),
        (in_turns, "epochs", True, 8, NEW_ITERATOR),
        (partial(by_hand, saves_at=2), "range", False, 3, COUNTED),
        (partial(by_hand, saves_at=3), "range", False, 6, COUNTED),
        (partial(by_hand, saves_at=4), "range", False, 4, NO_NOTE),
        (partial(by_hand, saves_at=3, ends_stepped=False), "range", False, 3, NO_NOTE),
        (without_loader, "range", False, 2, "no prepared loader was used in training"),
    ],
)
def test_iterators_and_counts_of_the_script_resume_exactly_or_are_reported(
    loop: Callable[[Script], None],
    over: str,
    saves: bool,
    stop: int,
    note: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train(folder: str, seed: int, stop: int = 0) -> list[str]:
        script = Script(tmp_path / folder, seed, over=over, saves=saves, stop=stop)
        try:
            loop(script)
            script.accelerator.end_training()
        except Cut:
            script.accelerator.parts.training.run.checkpoint.action = None
            script.accelerator.parts.preemption.release()
        return script.seen

    whole = train("whole", 1)
    capsys.readouterr()
    train("cut", 1, stop)
    rest = train("cut", 2)
    told = notes(capsys).replace("note: the run ends within an optimizer step", "")  # a true one
    assert (whole[-len(rest) :] == rest) == (note == NO_NOTE)
    assert note in told
    assert told.count("note:") == (note != NO_NOTE and told.count(note)), told


def test_a_peek_before_the_first_step_of_a_loop_does_not_hide_the_loop() -> None:
    loader = prepared()
    for _ in loader:
        next(iter(loader))
        assert loader.run.checkpoint.schedule(int)
        break


def test_save_state_in_the_middle_of_a_body_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for is_at_end in (True, False):
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(torch.arange(4.0)))  # type: ignore[arg-type]
        accelerator.parts.training.run.counts_training = True
        for number, _ in enumerate(loader):
            accelerator.parts.training.progress.num_trained += 1
            accelerator.save_state(tmp_path / f"{is_at_end}{number}")
            accelerator.parts.training.progress.num_trained += not is_at_end
            if number == 2 and is_at_end:
                break
        accelerator.parts.training.progress.num_trained += 1
        assert len([*loader]) == 4
        assert notes(capsys).count("trained after save_state() in") == (not is_at_end)
        accelerator.load_state(tmp_path / f"{is_at_end}2")
        assert [*loader]
        assert "the epoch is complete" not in notes(capsys)
    accelerator.load_state(tmp_path / "False3")
    assert [*loader]
    assert "the epoch is complete" in notes(capsys)


def test_loops_that_take_turns_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    for turns in ([0, 1, 1], [0, 1, 0]):
        first = prepared()
        loops = [iter(first), iter(PreparedDataLoader(DataLoader(range(4)), run=first.run))]  # type: ignore[arg-type]
        for number in turns:
            next(loops[number])
            first.run.progress.num_trained += 1
            first.run.checkpoint.update_leader()
        assert notes(capsys).count("take turns") == (turns[-1] == 0)
    first = prepared()
    second = PreparedDataLoader(DataLoader(range(12), 2), run=first.run)  # type: ignore[arg-type]
    for _ in zip(first, second, strict=False):
        first.run.progress.num_trained += 1
        next(iter(first))  # a look is no other loop
        first.run.checkpoint.update_leader()
    assert [loader.epochs.leads for loader in (first, second)] == [True, False]


def test_loops_of_single_batches_are_saved_between_them() -> None:
    run, taken = LoaderSet(Progress()), list[int]()
    one = [PreparedDataLoader(DataLoader(range(4), 4), run=run) for _ in range(2)]  # type: ignore[arg-type]
    for _ in run.count_epochs(3, [loader.epochs for loader in one]):
        for _ in chain(*one):
            run.progress.num_trained += 1
            run.checkpoint.schedule(lambda: taken.append(run.epoch or 0))
    assert taken == [0, 1, 1, 2, 2, 3]


def test_a_state_in_the_last_batch_of_an_epoch_has_its_loop_behind_it() -> None:
    loader, over = prepared(), list[list[int]]()
    for _ in loader.run.count_epochs(1, [loader.epochs]):
        for _ in loader:
            loader.run.progress.num_trained += 1
            over.append(loader.state_dict()["over"])
    assert over == [[]] * (len(over) - 1) + [[1]]


def test_a_run_saved_in_the_body_of_a_last_batch_continues_after_the_completed_loop() -> None:
    loader, restored = prepared(), list[int]()
    run, held = loader.run, prepared()
    run.counts_training, held.epochs.run = True, run
    run.resume(lambda: restored.append(1), [0, False, False, True], has_trained=True)
    run.await_epochs()
    loader.epochs.over = loader.epochs.saved_in = [1]
    for number in run.count_epochs(2, [loader.epochs]):
        assert len(restored) == 1 + number
        trained(loader)
        list(held)
    assert len(restored) == 2, "the loop of the second epoch does not drop what was drawn before"
    assert held.epochs.next_start.epoch == 2


@pytest.mark.parametrize("was_early", [True, False])
def test_a_checkpoint_before_a_look_is_taken_again_after_it(
    was_early: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    loader, taken = prepared(), list[bool]()
    run = loader.run
    run.resume(int, [None, was_early, False, False], has_trained=True)
    for _ in loader:
        run.progress.num_trained += 1
        run.checkpoint.schedule(lambda: taken.append(run.counted_epochs([loader.epochs])[1]))
    taken.clear()
    for number in (1, 2, 3):
        next(iter(loader))
        assert taken == [True, False, False][:number], "whether it was saved before peeking"
    assert notes(capsys).count("before a peek at") == was_early
    trained(loader)
    next(iter(loader))
    assert len(taken) == 4, "something was trained since the pass that it took"


def notes(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_what_does_not_resume_exactly_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    loader = prepared(sampler=Stateful())
    trained(loader)
    batches = iter(loader)
    next(batches)
    loader.run.progress.num_trained += 1
    position = loader.state_dict()
    assert notes(capsys) == ""
    other = prepared(sampler=Stateful())
    other.seek(position)
    list(other)
    assert "has its own state" in notes(capsys)
    for sampler, num_told in ((Stateful, (0, 1)), (Lazy, (0, 0))):
        loader = prepared(sampler=sampler())
        for told in num_told:  # between two epochs the one before is drawn again, and compared
            trained(loader)
            other = prepared(sampler=sampler())
            other.seek(loader.state_dict())
            assert notes(capsys).count("has its own state") == told
    trained(loader)
    other.seek(loader.state_dict())
    assert trained(other) == trained(loader)

    def left_after(batches: int, loader: PreparedDataLoader) -> dict[str, Any]:
        for number, _ in enumerate(loader, 1):
            loader.run.progress.num_trained += 1
            if number == batches:
                return loader.state_dict()
        return {}

    position = left_after(2, prepared())
    for before, at, count in ((4, 2, 1), (8, 2, 0), (4, 9, 1), (0, 9, 0)):  # 8 of 12, or all
        loader = prepared()
        loader.seek(position | {"left_after": before})
        left_after(at, loader)
        assert notes(capsys).count("its count restarted") == count, (before, at)
    for is_within in (False, True):  # another loader was resumed within its epoch
        second = prepared()
        second.seek(loader.state_dict() | {"left_after": 8})
        second.run.resumes_within |= is_within
        left_after(2, second)
        assert notes(capsys).count("its count restarted") == is_within


def test_what_is_left_of_an_epoch_and_dropped_is_the_beginning_of_the_next() -> None:
    def of_size(size: int) -> PreparedDataLoader:
        loader: DataLoader[int] = DataLoader(range(12), size, shuffle=True, drop_last=True)  # type: ignore[arg-type]
        return PreparedDataLoader(loader, run=LoaderSet(Progress()))

    set_seed(3)
    loader, other = of_size(1), of_size(4)
    batches = iter(loader)
    for _ in range(10):
        next(batches)
        loader.run.progress.num_trained += 1
    position = loader.state_dict()
    assert len([*batches]) == 2
    other.seek(position)
    assert (loader.epoch, other.epoch) == (1, 1)
    assert trained(other) == trained(loader)


def test_batches_that_the_script_keeps_are_reported_and_steps_in_one_batch_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def steps(loader: PreparedDataLoader, batches: Any, look: Callable[[], object] = int) -> str:
        loader.run.counts_training = True
        for number, _ in enumerate(batches):
            loader.run.progress.num_trained += 2
            look()
            if number == 8:
                break
        loader.run.counted_epochs([loader.epochs])
        return notes(capsys)

    loader = prepared()
    assert steps(loader, chain(loader, loader), lambda: next(iter(loader))) == ""
    loader = prepared()
    assert "batches that it keeps" in steps(loader, cycle(loader))
    loader = prepared()
    assert "batches that it keeps" in steps(loader, cycle([*loader]))
    position = loader.state_dict()
    for taken in (0, 1):  # a run that was resumed in the middle keeps only the rest
        (loader := prepared()).seek(position | {"place": [0, taken, 0]})
        loader.run.counts_training = True
        for _ in zip(cycle(loader), range(9), strict=False):
            loader.run.progress.num_trained += 2
        loader.run.attribute()
        assert ("batches that it keeps" in notes(capsys)) == taken
    due, kept = (loader := prepared()).run.checkpoint, iter(loader)
    next(kept)
    loader.run.progress.num_trained += 2  # a backward pass and an optimizer step
    assert [due.schedule(int), due.schedule(int)] == [True, True], "two calls after one step"
    loader.run.progress.num_trained += 2
    assert not due.schedule(int), "no loop will take it"
    assert "batches that it keeps" in notes(capsys)


class Numbered(StatefulStream):
    def set_epoch(self, epoch: int) -> None:
        pass


@pytest.mark.processes
def test_what_a_stream_keeps_and_a_new_run_has_not_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def numbered(**options: Any) -> PreparedDataLoader:
        loader = DataLoader(Numbered(range(99)), 2, **options)
        return PreparedDataLoader(loader, run=LoaderSet(Progress()))

    loader = numbered()
    for _ in loader:
        loader.run.progress.num_trained += 1
        loader.state_dict()
        break
    assert notes(capsys) == "", "within the loop"
    loader.state_dict()
    assert "with state_dict() ended early" in notes(capsys)
    workers: Any = {"num_workers": 1, "persistent_workers": True}
    numbered(**workers).state_dict()
    assert "does not reach persistent workers" in notes(capsys)
    monkeypatch.setattr(Numbered, "__module__", "datasets.iterable_dataset")
    numbered(**workers).state_dict()
    assert notes(capsys) == "", "in memory that workers share"


@pytest.mark.parametrize(
    ("loops", "reads_epoch", "is_reported"),
    [("aa", True, False), ("ab", True, True), ("abb", False, False), ("aba", False, True)],
)
def test_two_loops_over_one_loader_are_reported_but_not_an_iterator_that_is_created_anew(
    loops: str, reads_epoch: bool, is_reported: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = prepared()
    if reads_epoch:
        loader.run.begin_epochs()
    begin = {
        "a": lambda: iter(loader),
        "b": lambda: iter(loader),  # in another line
    }
    for loop in loops:
        for _ in begin[loop]():
            loader.run.progress.num_trained += 1
            loader.run.checkpoint.update_leader()
        loader.run.counted_epochs([loader.epochs])
    assert notes(capsys).count("several loops") == is_reported


def test_iterators_over_one_loader_that_take_turns_are_reported_and_looks_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loader = prepared()
    loader.run.progress.note_use(resuming=True)
    for _ in loader:
        look = iter(loader)
        next(look)
        assert [*loader]
    assert not notes(capsys)
    assert [*zip(loader, loader, strict=True)]
    assert notes(capsys).count("two iterators over one DataLoader take turns") == 1


@pytest.mark.parametrize("make", [Accelerator, CompatAccelerator])
def test_a_checkpoint_names_the_epoch_that_it_is_in(make: Any, tmp_path: Path) -> None:
    accelerator = make(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(24.0), batch_size=4, shuffle=True))  # type: ignore[arg-type]
    epochs: list[int | None] = []
    for _ in chain(loader, loader):
        accelerator.save_state(tmp_path / str(len(epochs)))
        epochs.append(read_manifest(tmp_path / str(len(epochs))).epoch)
    assert epochs == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2]  # the last batch ends an epoch
    accelerator.load_state(tmp_path / "1")


def test_epochs_of_a_run_are_counted_in_one_loop() -> None:
    run = LoaderSet(Progress())
    assert [*run.count_epochs(2, [])] == [0, 1]
    with pytest.raises(UsageError, match="has already been called"):
        next(run.count_epochs(2, []))


def test_a_pass_for_each_step_counts_its_samples_and_nothing_else() -> None:
    loader = prepared()
    loader.run.counts_training = True
    for _ in range(3):
        next(iter(loader))
        loader.run.progress.num_trained += 1
    assert (loader.epoch, loader.epochs.samples, loader.epochs.over) == (3, 6, [])
