"""A checkpoint counts once all of it is there; one that was being written never does."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

pytest.importorskip("torch")

from headway.libraries.folders import (
    WEIGHTS_ALONE,
    is_of_library,
    lightning_checkpoints,
    lightning_fault,
    trainer_checkpoints,
    trainer_fault,
)
from tests.libraries.saved import cut, save, writes


def test_a_save_that_is_killed_after_any_file_is_not_complete(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    for name in writes(folder, 5):
        assert (trainer_fault(folder) is None) == (name == "trainer_state.json"), f"after {name}"


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"],
)
def test_a_file_that_is_cut_off_is_named(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 5, 1.0)
    cut(folder / name)
    assert trainer_fault(folder) == f"{name} is cut off"


@pytest.mark.parametrize("name", ["scheduler.pt", "rng_state.pth"])
def test_a_checkpoint_from_which_trainer_would_go_on_in_part_is_not_complete(
    tmp_path: Path, name: str
) -> None:
    folder = save(tmp_path, 5, 1.0)
    (folder / name).unlink()
    fault = trainer_fault(folder)
    assert fault is not None
    assert "is missing" in fault
    if name == "scheduler.pt":
        (folder / "global_step5").mkdir()  # DeepSpeed has its own
        assert trainer_fault(folder) is None


def test_a_checkpoint_of_weights_alone_is_none_to_go_on_from(tmp_path: Path) -> None:
    folder = save(tmp_path, 5, 1.0)
    (folder / "optimizer.pt").unlink()
    assert trainer_fault(folder) == WEIGHTS_ALONE


def test_what_trainer_itself_calls_incomplete_is_that(tmp_path: Path) -> None:
    folder = save(tmp_path, 5, 1.0)
    (folder / "checkpoint-is-incomplete.txt").touch()
    assert trainer_fault(folder) == "it was being written"


def test_a_folder_is_searched_for_the_checkpoints_of_both_libraries(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-best").mkdir()
    assert not is_of_library(tmp_path)
    folder = save(tmp_path, 5, 7.0)
    (found,) = trainer_checkpoints(tmp_path)
    assert (found.path, found.at, found.step) == (folder, 7.0, 5)
    assert trainer_checkpoints(folder) == [found]
    logged = tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "epoch=0-step=5.ckpt"
    logged.parent.mkdir(parents=True)
    zipfile.ZipFile(logged, "w").close()
    (logged.parent / "last.ckpt").symlink_to(logged.name)
    (saved,) = lightning_checkpoints(tmp_path)
    assert saved.path == logged
    assert lightning_checkpoints(logged) == [saved]
    assert is_of_library(tmp_path)
    assert is_of_library(logged)
    assert lightning_fault(logged) is None
    cut(logged)
    assert lightning_fault(logged) is not None
