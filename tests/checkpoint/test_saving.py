"""A checkpoint is saved and loaded by one process here; by several in tests/distributed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from headway.checkpoint.folders import checkpoints_in, leftovers_in  # noqa: E402
from headway.checkpoint.loading import load_checkpoint  # noqa: E402
from headway.checkpoint.manifest import unlisted_files, verify  # noqa: E402
from headway.checkpoint.saving import CheckpointProgress, State  # noqa: E402
from headway.errors import CheckpointError  # noqa: E402
from tests.checkpoint.saving import save_checkpoint  # noqa: E402

WEIGHT = torch.arange(6.0).reshape(2, 3)
STATE = State({"model": {"weight": WEIGHT, "lr": 0.1}}, {"random": [1, 2], "states": torch.ones(3)})


def save(
    target: Path, state: State = STATE, *, hook: Callable[[Path], object] = str, **options: Any
) -> None:
    def state_of(folder: Path) -> State:
        hook(folder)
        return state

    save_checkpoint(target, state_of, CheckpointProgress(7, 1), **options)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a")

    def replace(_: str, saved: Any, was_sharded: bool) -> Any:
        save(tmp_path / "a", State({"model": {"weight": WEIGHT + 1, "lr": 0.2}}, STATE.own))
        return saved

    with pytest.raises(CheckpointError, match="replaced"):
        load_checkpoint(tmp_path / "a", replace)
    assert load_checkpoint(tmp_path / "a").shared["model"]["lr"] == 0.2


def test_what_another_process_removes_of_a_checkpoint_while_it_is_read_is_not_called_damaged(
    tmp_path: Path,
) -> None:
    save(tmp_path / "a")

    def remove(_: str, saved: Any, was_sharded: bool) -> Any:
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        return saved

    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path / "a", remove)
    assert str(tmp_path / "a" / "tensors") not in str(caught.value)


def test_files_of_the_script_in_the_folder_of_a_checkpoint_stay(tmp_path: Path) -> None:
    (tmp_path / "a" / "sub").mkdir(parents=True)
    (tmp_path / "a" / "sub" / "mine.txt").write_text("before")
    save(tmp_path / "a", hook=lambda folder: (folder / "hook.txt").write_text("1"))
    (tmp_path / "a" / "later.txt").write_text("after")
    save(tmp_path / "a")
    assert (tmp_path / "a" / "sub" / "mine.txt").read_text() == "before"
    assert (tmp_path / "a" / "later.txt").read_text() == "after"
    assert not (tmp_path / "a" / "hook.txt").exists()  # it was part of the older checkpoint
    assert unlisted_files(tmp_path / "a", verify(tmp_path / "a")) == ["later.txt", "sub/mine.txt"]


def fail(_: Path) -> None:
    raise OSError(28, "No space left on device", "somewhere")


@pytest.mark.parametrize("failure", ["object", "hook"])
def test_a_save_that_fails_leaves_the_checkpoint_before_it_and_nothing_else(
    failure: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    save(folder / "a")
    before = verify(folder / "a")
    state = State({"model": object()}, {}) if failure == "object" else STATE
    with pytest.raises(CheckpointError):
        save(folder / "a", state, hook=fail if failure == "hook" else str)
    assert verify(folder / "a") == before
    assert len(checkpoints_in(folder)) == 1
    assert leftovers_in(folder) == []


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_a_folder_whose_place_no_checkpoint_can_take_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="has no name"):
        save(Path(name))
    assert sorted(tmp_path.iterdir()) == before
