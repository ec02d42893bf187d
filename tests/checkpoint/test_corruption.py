"""What is not as it was saved is refused, whichever file it is in, and live objects stay."""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from headway import Accelerator  # noqa: E402
from headway.checkpoint.folders import COMPLETE, UNREADABLE, leftovers_in, listed_in  # noqa: E402
from headway.checkpoint.loading import load_checkpoint, weights_in  # noqa: E402
from headway.checkpoint.manifest import NAME, verify  # noqa: E402
from headway.errors import CheckpointError  # noqa: E402
from tests.checkpoint.saved import rewrite  # noqa: E402
from tests.trackers.full_disk import no_file_above  # noqa: E402


class Trained:
    """A model that has been trained for some steps, with all that belongs to it."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(steps)
        model = torch.nn.Linear(40, 30)
        self.accelerator = Accelerator(cpu=True)
        self.model, self.optimizer = self.accelerator.prepare(
            model, torch.optim.AdamW(model.parameters())
        )
        self.average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 1))
        self.accelerator.register_for_checkpointing(self.average)
        for _ in range(steps):
            self.model(torch.rand(5, 40)).sum().backward()
            self.optimizer.step()

    def bits(self) -> str:
        """Return all that a checkpoint could change."""
        owners = (self.model, self.optimizer, self.average)
        states = [*(owner.state_dict() for owner in owners), torch.get_rng_state()]
        lists = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.tolist, states)
        return f"{lists} {random.getstate()}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of two checkpoints of one training."""
    folder = tmp_path_factory.mktemp("saved")
    for steps in (1, 2):
        trained = Trained(steps)
        trained.accelerator.register_save_state_pre_hook(
            lambda models, weights, path: (Path(path) / "hook.txt").write_text(f"mine {path}")
        )
        trained.accelerator.save_state(folder / str(steps))
    return folder


@pytest.fixture(scope="module")
def live() -> Trained:
    """Return a training that no load of the module may change."""
    return Trained(3)


def flip(path: Path, _: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


CHANGES: dict[str, Callable[[Path, Path], object]] = {
    "flip a bit": flip,
    "cut": lambda path, _: os.truncate(path, path.stat().st_size // 2),
    "zero": lambda path, _: path.write_bytes(bytes(path.stat().st_size)),
    "append": lambda path, _: path.write_bytes(path.read_bytes() + b"\n"),
    "that of another checkpoint": lambda path, other: shutil.copy(other, path),
    "delete": lambda path, _: path.unlink(),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_of_any_file_is_refused_and_nothing_is_loaded(
    how: str, live: Trained, saved: Path, tmp_path: Path
) -> None:
    before = live.bits()
    for name in [NAME, *(file.path for file in verify(saved / "1").files)]:
        folder = Path(shutil.copytree(saved / "1", tmp_path / name.replace("/", "-")))
        path, other = folder / name, saved / "2" / name
        CHANGES[how](path, other)
        if how == "append" and name == NAME:  # white space is no part of JSON's value
            assert verify(folder) == verify(saved / "1")
        elif path.exists() and path.read_bytes() == (saved / "1" / name).read_bytes():
            assert name != NAME  # both have the same
        else:
            with pytest.raises(CheckpointError) as caught:
                live.accelerator.load_state(folder)
            (problem,) = caught.value.problems
            assert problem.what
            assert problem.fix
            assert str(folder) in problem.where
    assert live.bits() == before


def test_an_average_of_a_wrapped_model_is_refused_with_how_to_make_it(tmp_path: Path) -> None:
    wrapped, plain = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 1)}), torch.nn.Linear(2, 1)
    for model, fix in ((wrapped, "unwrap_model(model)"), (torch.nn.ReLU(), "the same objects")):
        accelerator = Accelerator(cpu=True)
        accelerator.register_for_checkpointing(torch.optim.swa_utils.AveragedModel(model))
        accelerator.save_state(tmp_path)
        accelerator = Accelerator(cpu=True)
        accelerator.register_for_checkpointing(torch.optim.swa_utils.AveragedModel(plain))
        with pytest.raises(CheckpointError, match=r"'module\..* exists only in this run") as caught:
            accelerator.load_state(tmp_path)
        assert fix in caught.value.problems[0].fix


def test_a_layer_of_another_size_is_named(tmp_path: Path) -> None:
    for size in (2, 3):
        accelerator, model = Accelerator(cpu=True), torch.nn.Linear(size, 1)
        accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        if size == 2:
            accelerator.save_state(tmp_path)
    with pytest.raises(CheckpointError, match=r"shape of 'weight' of model 0: \[1, 2\]") as caught:
        accelerator.load_state(tmp_path)
    assert "load another checkpoint" in caught.value.problems[0].fix


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("dump", [pickle.dump, torch.save], ids=["pickle", "torch.save"])
def test_a_bomb_in_any_file_does_not_run_though_all_checksums_are_right(
    dump: Callable[[object, Any], None], saved: Path, tmp_path: Path
) -> None:
    live = Trained(3)
    before = live.bits()
    names = [file.path for file in verify(saved / "1").files]
    for name in [NAME, *names]:
        folder = tmp_path / "bombed"
        shutil.copytree(saved / "1", folder)
        with open(folder / name, "wb") as file:
            dump(Bomb(), file)
        if name != NAME:
            rewrite(folder)
        if name == "hook.txt":  # only the script's own hook would read it
            live.accelerator.register_load_state_pre_hook(lambda models, path: models.clear())
        if name == "tensors/.metadata":  # which is there for torch alone
            load_checkpoint(folder)
            shutil.rmtree(folder)
            continue
        with pytest.raises(CheckpointError):
            live.accelerator.load_state(folder)
        assert not Path("exploded").exists()
        shutil.rmtree(folder)
    assert live.bits() == before


TEXTS = [
    *("", "[]", "[" * 10_000, '{"a": 1, "a": 2}', '{"dict": [["a", NaN]]}', '{"dict": 1}'),
    *('{"tensor": "shared.away"}', '{"dict": [["a", {}]]}', '{"dict": [["models", {"dict": []}]]}'),
]
PLACES: list[tuple[str, list[str], list[Any]]] = [
    ("values.json", ["optimizers"], [None, 1, [], [1], {"dict": []}]),
    ("values.json", ["optimizers", "parameters"], [None, [[["1.weight", [1]]]], [[1]], "a"]),
    ("values.json", ["optimizers", "kind"], [None, "Adam", 1]),
    ("values.json", ["models"], [None, [], [1], {"dict": []}]),
    ("values.json", ["objects"], [None, [], [{"dict": [["kind", "AveragedModel"]]}]]),
    ("values.json", ["precision"], [None, {"dict": [["name", "bf16"], ["state", 1]]}]),
    ("values.json", ["accumulation"], [None, 1, {"dict": []}]),
    ("values_rank0.json", ["generators"], [1, {"dict": []}]),
    ("values.json", ["loaders"], [1, [1], {"dict": []}, {"dict": [["positions", [1]]]}]),
    ("values.json", ["loaders", "positions"], [1, [1], [{"dict": []}]]),
]


def put(value: Any, path: list[str], other: Any) -> None:
    """Put something else in one place of encoded values; in the first one of a list."""
    pair = next(pair for pair in value["dict"] if pair[0] == path[0])
    if len(path) == 1:
        pair[1] = other
    else:
        put(pair[1][0] if isinstance(pair[1], list) else pair[1], path[1:], other)


def write(text: str, folder: Path) -> None:
    (folder / "values.json").write_text(text)


def forge(name: str, path: list[str], other: Any, folder: Path) -> None:
    value = json.loads((folder / name).read_text())
    put(value, path, other)
    (folder / name).write_text(json.dumps(value))


def position(value: int) -> Callable[[Path], object]:
    """Return what puts the position in numpy's generator where it reads other memory."""

    def change(folder: Path) -> None:
        own = json.loads((folder / "values_rank0.json").read_text())
        states = next(state for key, state in own["dict"] if key == "generators")
        numpy = next(state for key, state in states["dict"] if key == "numpy")
        assert 0 <= numpy["tuple"][2] <= 624
        numpy["tuple"][2] = value
        (folder / "values_rank0.json").write_text(json.dumps(own))

    return change


FORGERIES: list[Callable[[Path], object]] = [
    *(partial(write, text) for text in TEXTS),
    *(partial(forge, name, path, other) for name, path, all_ in PLACES for other in all_),
    *map(position, (-1, 625, 10**6)),
]


@pytest.mark.parametrize("change", FORGERIES, ids=range(len(FORGERIES)))
def test_a_state_that_no_save_writes_is_refused_though_all_checksums_are_right(
    change: Callable[[Path], object], live: Trained, saved: Path, tmp_path: Path
) -> None:
    before = live.bits()
    folder = Path(shutil.copytree(saved / "1", tmp_path / "forged"))
    change(folder)
    rewrite(folder)
    verify(folder)
    with pytest.raises(CheckpointError) as caught:
        live.accelerator.load_state(folder)
    assert str(folder) in caught.value.problems[0].where
    assert live.bits() == before


@pytest.mark.parametrize("other", [None, 1, [1], {"dict": []}, [{"tuple": []}]])
def test_what_is_exported_is_judged_as_what_is_loaded(
    other: Any, saved: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved / "1", tmp_path / "forged"))
    assert [*weights_in(folder)[0]] == ["weight", "bias"]
    forge("values.json", ["models"], other, folder)
    rewrite(folder)
    with pytest.raises(CheckpointError):
        weights_in(folder)


# ---------------------------------------------------------------------- disks that are full


def refused(folder: Path) -> CheckpointError:
    """Return the error of a save to a checkpoint that is there already, and stays."""
    before = verify(folder)
    with pytest.raises(CheckpointError) as caught:
        Trained(2).accelerator.save_state(folder)
    assert verify(folder) == before
    assert leftovers_in(folder.parent) == []
    return caught.value


def num_open_writers() -> int:
    return sum(isinstance(one, io.BufferedWriter) and not one.closed for one in gc.get_objects())


def test_where_files_can_grow_to_a_certain_size_only_the_error_names_file_and_cause(
    tmp_path: Path,
) -> None:
    Trained(1).accelerator.save_state(tmp_path / "a")
    before = num_open_writers()
    largest = max(file.size for file in verify(tmp_path / "a").files)
    for part in range(20):
        with no_file_above(largest * part // 20):
            problem = refused(tmp_path / "a").problems[0]
        assert os.strerror(27) in problem.what  # EFBIG
        assert "ulimit -f" in problem.fix
        assert ".tmp-a-" in problem.where
        assert num_open_writers() == before  # the interpreter would write the rest as it exits
    Trained(2).accelerator.save_state(tmp_path / "a")
    assert verify(tmp_path / "a").step == 2


# ---------------------------------------------------------------------- other users


@pytest.mark.parametrize(
    ("closed", "named", "state"),
    [
        (NAME, NAME, UNREADABLE),
        ("tensors", "tensors/", UNREADABLE),
        ("values.json", "values.json", COMPLETE),  # its size is right
    ],
)
def test_a_checkpoint_that_this_user_may_not_read_is_named_as_closed_and_not_passed_over(
    closed: str, named: str, state: str, saved: Path, ordinary_user: None
) -> None:
    for number, name in enumerate(("checkpoint_1", "checkpoint_2"), 1):
        shutil.copytree(saved / str(number), Path("run", name))
    accelerator = Accelerator(cpu=True, project_dir="run")
    newest = Path("run/checkpoint_2").absolute()
    (newest / closed).chmod(0)
    for method, words in (("load_state", [newest]), ("resume", [])):
        with pytest.raises(CheckpointError, match="Permission denied") as caught:
            getattr(accelerator, method)(*words)
        assert f"checkpoint_2/{named}" in str(caught.value)
        assert "damaged" not in str(caught.value)
    assert [entry.state for entry in listed_in(Path("run"))] == [COMPLETE, state]
    (newest / closed).chmod(0o700)
    Path("run").chmod(0)
    with pytest.raises(CheckpointError, match="Permission denied"):
        accelerator.resume()
    Path("run").chmod(0o700)
    accelerator.end_training()
