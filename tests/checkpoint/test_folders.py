"""A checkpoint is there as a whole or not at all, whatever happens while it is saved."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import pytest

from headway.checkpoint import folders, manifest
from headway.checkpoint.folders import (
    STEP,
    SaveTimes,
    checkpoints_in,
    newest_in,
    prune,
    recover,
)
from headway.checkpoint.manifest import verify
from headway.errors import CheckpointError
from tests.checkpoint.saved import save


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that cannot exchange two folders."""
    monkeypatch.setattr(folders, "exchange", lambda one, other: False)


def test_a_saved_checkpoint_is_listed_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(folder / "a", step=3)
    save(folder / "a", step=4)
    assert [verify(checkpoint.path).step for checkpoint in checkpoints_in(folder)] == [4]
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert (folder / "a").stat().st_mode == folder.stat().st_mode


def test_checkpoints_are_ordered_by_time_and_not_by_name_even_if_the_clock_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (9, 10, 11):
        monkeypatch.setattr(time, "time", lambda now=1e9 - number: now)
        save(tmp_path / f"checkpoint_{number}", step=number)
    assert [verify(checkpoint.path).step for checkpoint in checkpoints_in(tmp_path)] == [9, 10, 11]
    times = SaveTimes()
    assert times.next(tmp_path / "other") > 1e9 - 9
    with monkeypatch.context() as patch:  # the first save alone reads manifests
        patch.setattr(folders, "read_manifest", None)
        assert times.next(tmp_path / "other") > 1e9 - 9
        assert prune(tmp_path, 3, "checkpoint_") == {}
        times.prune(tmp_path, 2, "checkpoint_")
    with monkeypatch.context() as patch:
        patch.setattr(folders, "remove", lambda path: False)  # as in another user's sticky folder
        patch.setattr(os, "access", lambda path, mode: path == tmp_path.parent)
        folders.note_unwritable(tmp_path)
        assert f"note: {tmp_path} is not writable" in capsys.readouterr().err
        folders.note_unwritable(tmp_path.parent / "new")
        assert not capsys.readouterr().err
        times.prune(tmp_path, 1, "checkpoint_")
        assert f"cannot remove the old checkpoint {tmp_path}" in capsys.readouterr().err
    assert [path.name for path in prune(tmp_path, 1)] == ["checkpoint_10"]
    assert prune(tmp_path, 0) == {}
    assert [verify(checkpoint.path).step for checkpoint in checkpoints_in(tmp_path)] == [11]


@pytest.mark.parametrize("kind", ["file", "below a file", "link", "read-only folder"])
def test_where_a_checkpoint_cannot_take_its_place_the_save_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a"
    if kind == "file":
        target.write_text("mine")
    elif kind == "below a file":
        target.write_text("")
        target /= "b"
    elif kind == "link":
        target.symlink_to(tmp_path)
    else:
        save(target)
        monkeypatch.setattr(folders, "exchange", lambda one, other: False)
        monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError) as caught:
        save(target, step=2)
    assert str(tmp_path / "a") in caught.value.problems[0].where
    if kind == "file":
        assert target.read_text() == "mine"
    if kind == "read-only folder":
        assert verify(target).step == 1


def refuse(*_: object) -> None:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("kind", ["new", "exchanged", "replaced"])
def test_where_the_name_of_a_checkpoint_does_not_reach_the_disk_the_one_before_it_stands(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a"
    if kind != "new":
        save(target)
    if kind == "replaced":
        monkeypatch.setattr(folders, "exchange", lambda one, other: False)
    sync = os.fsync

    def fail(handle: int) -> None:
        if os.fstat(handle).st_ino == tmp_path.stat().st_ino:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(handle)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError) as caught:
        save(target, step=2)
    assert str(target) in caught.value.problems[0].where
    assert [verify(c.path).step for c in checkpoints_in(tmp_path)] == [1] * (kind != "new")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".old-")]


def test_prune_leaves_links_and_what_they_lead_to_alone(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        save(folder / f"step_{step:08d}", step=step)
    save(tmp_path / "elsewhere", step=0)
    (folder / "zlatest").symlink_to("step_00000003")
    (folder / "step_00000009").symlink_to("step_00000003")
    (folder / "best").symlink_to(tmp_path / "elsewhere")
    assert [path.name for path in prune(folder, 2)] == ["step_00000001"]
    prune(folder, 1, STEP)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("best", "step_00000003", "step_00000009", "zlatest")
    ]
    assert verify(folder / "best").step == 0


def test_what_cannot_be_removed_in_full_is_no_checkpoint_and_not_said_to_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(tmp_path / f"step_{step:08d}", step=step)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    assert prune(tmp_path, 1) == {tmp_path / "step_00000001": False}
    assert [verify(checkpoint.path).step for checkpoint in checkpoints_in(tmp_path)] == [2]


# ---------------------------------------------------------------------- two runs at once


def test_a_checkpoint_that_another_run_replaces_while_it_is_verified_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a")
    look, steps = manifest._find_damage, iter([2, 3, 4, 5, 6])

    def look_late(folder: Path, found: manifest.Manifest, at: float) -> CheckpointError | None:
        for step in steps:
            save(tmp_path / "a", step=step)
            if step in (3, 6):
                break
        return look(folder, found, at)

    monkeypatch.setattr(manifest, "_find_damage", look_late)
    assert verify(tmp_path / "a").step == 6


@pytest.mark.usefixtures("no_exchange")
def test_a_commit_that_was_cut_off_between_its_renames_is_finished_with_the_newer_whole_one(
    tmp_path: Path,
) -> None:
    save(tmp_path / "a", step=1)
    (tmp_path / "a").rename(tmp_path / ".old-a-12345678")
    recover(tmp_path / "a")
    assert verify(tmp_path / "a").step == 1
    save(tmp_path / "new", step=2)
    (tmp_path / "a").rename(tmp_path / ".old-a-12345678")
    (tmp_path / "new").rename(tmp_path / ".tmp-a-12345678")
    recover(tmp_path / "a")
    assert verify(tmp_path / "a").step == 2


@pytest.mark.usefixtures("no_exchange")
def test_a_commit_that_was_cut_off_and_cannot_be_finished_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / ".old-a-12345678")
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError) as caught:
        newest_in(tmp_path)
    assert str(tmp_path / "a") in caught.value.problems[0].where
