"""A training is saved and goes on, in one process."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from headway import Accelerator
from headway.checkpoint.folders import checkpoints_in, leftovers_in
from headway.checkpoint.loading import load_checkpoint
from headway.checkpoint.manifest import FORMAT, NAME, verify
from headway.errors import CheckpointError, UsageError
from headway.utils import ProjectConfiguration, set_seed
from tests.data.streams import StatefulStream, Stream
from tests.runtime.resumed_training import Counter, Training


class Augmented(Dataset[torch.Tensor]):
    """Samples that differ each time that they are drawn."""

    def __init__(self, size: int = 23) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(3) + random.random() + float(np.random.rand())
        return torch.cat([torch.tensor([float(index)]), noise])


def begun(seed: int = 0, **options: Any) -> Training:
    own: dict[str, Any] = {
        "data": Augmented(),
        "loader": {"shuffle": True, "batch_size": 4},
        "project_dir": None,
    }
    return Training(seed, **own | options)


def saved_at(step: int, folder: Path, **options: Any) -> Training:
    """Train three epochs without a break, and save after one step."""
    run = begun(**options)
    for _ in range(3):
        for count in run.batches():
            if count == step:
                run.accelerator.save_state(str(folder))
    return run


def fields_of(value: Any, path: str = "") -> Iterator[str]:
    """Yield the keys and lengths in a checkpoint, except below the states of torch's objects."""
    if path.endswith((".state", ".hyperparameters")) or isinstance(value, (str, torch.Tensor)):
        yield path
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from fields_of(part, f"{path}.{key}")
    elif isinstance(value, Sequence):
        yield f"{path}[{len(value)}]"
        for part in value:
            yield from fields_of(part, f"{path}[]")
    else:
        yield path


def test_a_checkpoint_with_other_fields_has_another_format(tmp_path: Path) -> None:
    saved_at(3, tmp_path / "saved")
    loaded = load_checkpoint(tmp_path / "saved")
    fields = {*fields_of(loaded.shared), *fields_of(loaded.own)}
    assert (FORMAT, crc32("\n".join(sorted(fields)).encode())) == (14, 3505302306), sorted(fields)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "in order": {"loader": {"batch_size": 4}},
    "drop_last": {"loader": {"batch_size": 4, "shuffle": True, "drop_last": True}},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("step", [5, 8])  # the last or last but one of an epoch, and another
def test_a_run_goes_on_bit_for_bit_in_the_middle_of_an_epoch(
    name: str, step: int, tmp_path: Path
) -> None:
    whole = saved_at(step, tmp_path / "saved", **OPTIONS[name])
    resumed = begun(seed=99, **OPTIONS[name])
    resumed.accelerator.load_state(tmp_path / "saved")
    done, is_inside = divmod(step, len(whole.loader))
    torch.rand(7 if is_inside else 0)  # what a script may draw before its loop
    resumed.epochs(3 - done)
    assert resumed.losses == whole.losses[step:]
    assert resumed.weights() == whole.weights()
    assert torch.equal(resumed.counter.state["seen"], whole.counter.state["seen"])
    assert resumed.scheduler.get_last_lr() == whole.scheduler.get_last_lr()
    assert resumed.loader.epoch == whole.loader.epoch == 3


def test_a_script_that_skips_batches_itself_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = saved_at(8, tmp_path / "saved")
    resumed = begun(seed=99)
    resumed.accelerator.load_state(tmp_path / "saved")
    for _ in resumed.batches(resumed.accelerator.skip_first_batches(resumed.loader, 2)):
        pass
    resumed.epochs(1)
    assert resumed.losses == whole.losses[8:]


@pytest.mark.parametrize("stream", [Stream, StatefulStream])
def test_a_stream_resumes_without_a_report_where_it_gives_the_same_samples(
    stream: type[Stream], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loader, rows = {"batch_size": 4}, torch.arange(92.0).reshape(23, 4)
    whole = saved_at(8, tmp_path / "saved", data=stream(rows), loader=loader)
    resumed = begun(seed=99, data=stream(rows), loader=loader)
    resumed.accelerator.load_state(tmp_path / "saved")
    resumed.epochs(2)
    assert resumed.losses == whole.losses[8:]
    assert capsys.readouterr().err == ""


def test_another_number_of_samples_in_the_middle_of_an_epoch_is_refused(tmp_path: Path) -> None:
    saved_at(8, tmp_path / "saved")
    resumed = begun(data=Augmented(24))
    before = resumed.weights()
    with pytest.raises(CheckpointError, match="24"):
        resumed.accelerator.load_state(tmp_path / "saved")
    assert resumed.weights() == before


def test_the_rest_of_an_epoch_has_the_samples_that_another_batch_size_has_left(
    tmp_path: Path,
) -> None:
    whole = saved_at(8, tmp_path / "saved")
    resumed = begun(loader={"shuffle": True, "batch_size": 3})
    resumed.accelerator.load_state(tmp_path / "saved")
    for _ in resumed.batches():
        pass
    rest = [index for _, batch in whole.losses[8:12] for index in batch]
    assert [index for _, batch in resumed.losses for index in batch] == rest
    assert resumed.losses[0][1] == rest[:3]


# ---------------------------------------------------------------------- names and folders


def automatic(folder: Path, **options: Any) -> Accelerator:
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, **options)
    return Accelerator(cpu=True, project_config=project)


def test_checkpoints_are_numbered_and_the_oldest_removed(tmp_path: Path) -> None:
    accelerator = automatic(tmp_path, total_limit=2)
    folders = [accelerator.save_state() for _ in range(3)]
    assert [Path(f).name for f in folders] == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    names = [checkpoint.path.name for checkpoint in checkpoints_in(tmp_path / "checkpoints")]
    assert names == ["checkpoint_1", "checkpoint_2"]
    other = automatic(tmp_path)
    with pytest.raises(CheckpointError, match="iteration"):
        automatic(tmp_path, iteration=2).save_state()
    other.load_state()
    assert other.save_iteration == 3
    newest = Path(other.save_state())
    assert newest.name == "checkpoint_3"
    (newest / NAME).write_text("{}")
    with pytest.raises(CheckpointError, match="checkpoint_3"):  # it is not passed over
        automatic(tmp_path).load_state()


def test_the_folders_of_a_project_are_those_that_were_given(tmp_path: Path) -> None:
    project = ProjectConfiguration(logging_dir="logs")
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, project_config=project)
    assert (accelerator.project_dir, accelerator.logging_dir) == (tmp_path, "logs")
    assert accelerator.project_configuration is project


def test_the_newest_checkpoint_cannot_be_loaded_before_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        automatic(tmp_path).load_state()


# ---------------------------------------------------------------------- hooks and objects


def test_hooks_get_what_accelerate_gives_them_and_may_take_weights_out(tmp_path: Path) -> None:
    run = begun()
    seen: list[Any] = []

    def save_hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        seen.append((models, [*weights], output_dir))
        torch.save(weights.pop(), Path(output_dir) / "mine.bin")

    def load_hook(models: list[Any], input_dir: str) -> None:
        models.pop().load_state_dict(torch.load(Path(input_dir) / "mine.bin"))

    handle = run.accelerator.register_save_state_pre_hook(save_hook)
    run.accelerator.save_state(tmp_path / "saved")
    assert seen[0][0] == [run.model]
    assert seen[0][1][0].keys() == run.model.state_dict().keys()
    assert Path(seen[0][2]).parent == tmp_path
    assert not Path(seen[0][2]).exists()
    assert "mine.bin" in [file.path for file in verify(tmp_path / "saved").files]
    before = run.weights()
    resumed = begun(seed=99)
    with pytest.raises(CheckpointError, match="models"):
        resumed.accelerator.load_state(tmp_path / "saved")
    resumed.accelerator.register_load_state_pre_hook(load_hook)
    resumed.accelerator.load_state(tmp_path / "saved")
    assert resumed.weights() == before
    handle.remove()
    run.accelerator.save_state(tmp_path / "saved")
    assert len(seen) == 1


def test_an_object_that_is_no_value_is_refused_or_pickled_where_asked(tmp_path: Path) -> None:
    run = begun()
    run.counter.state = {"path": Path("a")}
    with pytest.raises(CheckpointError, match="PosixPath"):
        run.accelerator.save_state(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    assert leftovers_in(tmp_path) == []
    run.accelerator.save_state(tmp_path / "saved", allow_pickle=True)
    run.counter.state = None
    before = run.weights()
    with pytest.raises(CheckpointError, match="allow_pickle"):
        run.accelerator.load_state(tmp_path / "saved")
    assert (run.weights(), run.counter.state) == (before, None)
    run.accelerator.load_state(tmp_path / "saved", allow_pickle=True)
    assert run.counter.state == {"path": Path("a")}


def test_an_object_that_cannot_even_be_pickled_is_named(tmp_path: Path) -> None:
    run = begun()
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for state in ({"call": lambda: None}, {"deep": deep}):
        run.counter.state = state
        with pytest.raises(CheckpointError, match=type(run.counter).__name__):
            run.accelerator.save_state(tmp_path / "saved", allow_pickle=True)
    assert not (tmp_path / "saved").exists()
    assert leftovers_in(tmp_path) == []


def changed(run: Training, what: str) -> None:
    if what == "shape":
        run.accelerator.parts.training.prepared[0] = (torch.nn.Linear(4, 1),) * 2
    elif what == "dtype":
        run.model.half()
    elif what == "optimizer":
        run.optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    elif what == "object":
        run.accelerator.register_for_checkpointing(Counter())
    elif what == "model":
        run.accelerator.prepare(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("what", ["shape", "dtype", "optimizer", "object", "model"])
def test_a_checkpoint_that_does_not_fit_changes_nothing(what: str, tmp_path: Path) -> None:
    saved_at(8, tmp_path / "saved")
    run = begun(seed=99)
    next(run.batches())
    changed(run, what)
    before = run.weights(), repr(run.optimizer.state_dict()), torch.get_rng_state().tolist()
    with pytest.raises(CheckpointError) as caught:
        run.accelerator.load_state(tmp_path / "saved")
    assert "contextlib.py" not in {Path(str(entry.path)).name for entry in caught.traceback}
    after = run.weights(), repr(run.optimizer.state_dict()), torch.get_rng_state().tolist()
    assert after == before
    assert run.loader.epoch == 1


def test_a_layer_that_is_wrapped_in_one_run_only_is_named_with_its_fix(tmp_path: Path) -> None:
    plain, layer = Accelerator(cpu=True), torch.nn.Linear(1, 1)
    plain.prepare(torch.nn.Sequential(layer))
    plain.save_state(tmp_path / "saved")
    wrapped: Any = torch.compile(layer, backend="eager")
    other = Accelerator(cpu=True)
    other.prepare(torch.nn.Sequential(wrapped))
    with pytest.raises(CheckpointError, match="fix:  compile and wrap the same modules"):
        other.load_state(tmp_path / "saved")


class OwnAdam(torch.optim.Adam):
    """A class of the script."""


def prepared_for(optimizer: Any, *objects: Any, sizes: tuple[int, ...] = (2, 2)) -> Accelerator:
    """Return an Accelerator that has a model, and what `optimizer` makes of its layers."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(*(torch.nn.Linear(size, 1, bias=False) for size in sizes))
    accelerator.prepare(model, optimizer(model))
    accelerator.register_for_checkpointing(*objects)
    return accelerator


def adam(model: Any, kind: Any = torch.optim.Adam) -> Any:
    return kind(model.parameters(), lr=0.1)


def own_adam(model: Any) -> Any:
    return adam(model, OwnAdam)


class OtherCounter(Counter):
    """It has the state of a Counter."""


MISFITS: dict[str, tuple[Callable[[], Accelerator], Callable[[], Accelerator]]] = {
    "a class derived from it": (lambda: prepared_for(adam), lambda: prepared_for(own_adam)),
    "parameters in another order": (
        lambda: prepared_for(adam),
        lambda: prepared_for(lambda model: torch.optim.Adam([*model.parameters()][::-1])),
    ),
    "registered in another order": (
        lambda: prepared_for(adam, OtherCounter(), Counter()),
        lambda: prepared_for(adam, Counter(), OtherCounter()),
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_state_that_looks_the_same_but_is_of_another_object_is_refused(
    name: str, tmp_path: Path
) -> None:
    first, second = MISFITS[name]
    folder = first().save_state(tmp_path / "saved")
    first().load_state(folder)
    run = second()
    before = repr([obj.state_dict() for _, obj in run.parts.training.prepared])
    with pytest.raises(CheckpointError):
        run.load_state(folder)
    assert repr([obj.state_dict() for _, obj in run.parts.training.prepared]) == before


def test_a_class_that_has_moved_to_another_module_is_the_same(tmp_path: Path) -> None:
    folder = prepared_for(own_adam).save_state(tmp_path / "saved")
    moved = type("OwnAdam", (torch.optim.Adam,), {"__module__": "elsewhere"})
    prepared_for(lambda model: adam(model, moved)).load_state(folder)


def test_a_state_that_an_object_does_not_take_ends_with_an_error_that_nobody_takes_for_a_refusal(
    tmp_path: Path,
) -> None:
    class Picky(Counter):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("best")

    run = prepared_for(lambda model: torch.optim.SGD(model.parameters(), lr=0.1), Picky())
    folder = run.save_state(tmp_path / "saved")
    with pytest.raises(UsageError) as caught:
        run.load_state(folder)
    assert "registered object 0, Picky" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def test_weights_that_both_have_are_loaded_where_asked(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "saved")
    other = Accelerator(cpu=True)
    loaded = other.prepare(torch.nn.Linear(2, 2, bias=False))
    with pytest.raises(CheckpointError, match="bias"):
        other.load_state(tmp_path / "saved")
    other.load_state(tmp_path / "saved", strict=False)
    assert torch.equal(loaded.weight, model.weight)


def test_an_evaluation_in_an_epoch_s_last_batch_is_part_of_a_save_after_it() -> None:
    def trained(steps: int) -> list[list[float]]:
        """Train for so many steps, from the newest checkpoint on; return what each has drawn."""
        accelerator = Accelerator(cpu=True, project_dir="run")
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        data: Any = TensorDataset(torch.arange(6.0).reshape(6, 1))
        model, optimizer, scheduler, loader, evaluation = accelerator.prepare(
            *(model, optimizer, scheduler),
            *(DataLoader(data, batch_size=2, shuffle=True) for _ in range(2)),
        )
        drawn: list[list[float]] = []
        for _ in range(accelerator.resume().epoch, 3):
            for (batch,) in loader:
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
                seen = [*batch.flatten().tolist(), optimizer.param_groups[0]["lr"]]
                if loader.end_of_dataloader:
                    seen += [x for (inputs,) in evaluation for x in inputs.flatten().tolist()]
                    scheduler.step()
                drawn.append(seen)
                accelerator.checkpoint(every=1)
                if len(drawn) == steps:
                    accelerator.end_training()
                    return drawn
        accelerator.end_training()
        return drawn

    set_seed(3)
    whole = trained(9)
    shutil.rmtree("run")
    set_seed(3)
    parts = trained(3)
    set_seed(4)
    assert parts + trained(6) == whole
