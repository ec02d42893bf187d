"""An error of the disk is not an absence: what cannot be read is named, and nothing is removed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from headway import Accelerator  # noqa: E402
from headway.checkpoint import folders, saving  # noqa: E402
from headway.checkpoint.folders import NUMBERED, STEP, listed_in, prune  # noqa: E402
from headway.checkpoint.manifest import NAME, files_below  # noqa: E402
from headway.checkpoint.tensors import save_tensors  # noqa: E402
from headway.commands.checkpoint import main  # noqa: E402
from headway.errors import CheckpointError, HeadwayError  # noqa: E402
from headway.history import record, store  # noqa: E402
from headway.integrations.resuming import TrainerSave, add_to_list, read_list  # noqa: E402
from headway.ipc.paths import is_absent  # noqa: E402
from headway.settings.profile import find_project_profile  # noqa: E402
from tests.checkpoint.saved import save  # noqa: E402


@contextmanager
def broken(at: Path, number: int) -> Iterator[None]:
    """Make the system fail for a path and all below it."""

    def failing(call: Any) -> Any:
        def called(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            text = "" if isinstance(path, int) else os.fsdecode(path)
            if Path(text).absolute().is_relative_to(at):
                raise OSError(number, os.strerror(number), text)
            return call(path, *args, **kwargs)

        return called

    with pytest.MonkeyPatch.context() as patch:
        for name in ("lstat", "stat", "open", "listdir", "scandir"):
            patch.setattr(os, name, failing(getattr(os, name)))
        yield


def train(project: Path, steps: int = 0, *, fall_back: bool = False) -> int:
    accelerator = Accelerator(cpu=True, project_dir=project)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run = accelerator.resume(fall_back=fall_back)
    for _ in range(steps):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        accelerator.checkpoint()
    accelerator.end_training()
    return run.step


@pytest.mark.parametrize("number", [errno.EIO, errno.EBADMSG, errno.ESTALE])
@pytest.mark.parametrize("what", ["", NAME, "values.json", "tensors"])
def test_a_newest_checkpoint_that_the_disk_cannot_read_is_named_and_stays(
    what: str, number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, 3)
    folder = tmp_path / "checkpoints"
    newest = folder / "step_00000003"
    with broken(newest / what, number):
        with pytest.raises(CheckpointError, match=os.strerror(number)) as caught:
            train(tmp_path)
        assert str(newest) in caught.value.problems[0].where
        assert "fall_back=True" in caught.value.problems[0].fix
        assert "step_00000002" in caught.value.problems[0].fix
        assert [entry.state for entry in listed_in(folder)] == ["complete", "unreadable"]
        assert main(["verify", str(tmp_path)]) == 1
        assert str(newest) in capsys.readouterr().err
        assert train(tmp_path, fall_back=True) == 2
        assert "skipped: " in capsys.readouterr().err
    assert newest in [entry.path for entry in listed_in(folder)]


def test_a_newest_one_of_another_format_or_without_manifest_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 3)
    newest = tmp_path / "checkpoints" / "step_00000003" / NAME
    newest.write_text(newest.read_text().replace('"format": ', '"format": 9'))
    with pytest.raises(CheckpointError, match="fix:  load it with the version"):
        train(tmp_path)
    newest.unlink()
    with pytest.raises(CheckpointError, match="no manifest"):
        train(tmp_path)
    assert train(tmp_path, fall_back=True) == 2


def test_a_project_folder_that_is_a_file_is_refused_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    (tmp_path / "project").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"):
        train(tmp_path / "project")


def test_a_rotation_removes_only_names_that_it_gives(tmp_path: Path) -> None:
    others = ["best", "step_7", "step_00000001_best", "checkpoint_01", "checkpoint_x", "step_٣"]
    own = {start: [f"{start}{number:08}" for number in range(3)] for start in (STEP,)}
    own[NUMBERED] = ["checkpoint_9", "checkpoint_10", "checkpoint_11"]
    left = [".tmp-mine", ".old-mine-1234", ".trash-can", ".tmp-a-0123abcd", ".trash-0123abcd"]
    folder = tmp_path / "checkpoints"
    for name in (*others, *own[STEP], *own[NUMBERED]):
        save(folder / name)
    for name in left:
        (folder / name).mkdir()
    prune(folder, 2, STEP)
    prune(folder, 1, NUMBERED)
    folders.remove_leftovers(tmp_path)
    kept = [*others, *own[STEP][1:], *own[NUMBERED][2:], *left[:3]]
    assert sorted(os.listdir(folder)) == sorted(kept)


def test_what_an_interrupted_save_left_and_cannot_be_removed_fails_no_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, 3)
    left = tmp_path / "checkpoints" / ".trash-0123abcd"
    left.mkdir()
    (gone := left.with_name(".tmp-step_00000004-0123abcd")).mkdir()
    with broken(left, errno.EIO):
        assert train(tmp_path) == 3
    assert not gone.exists()
    assert f"leftovers of an interrupted save: {left}" in capsys.readouterr().err


@pytest.mark.processes
def test_what_another_live_run_writes_stays_and_the_run_is_named_until_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(tmp_path, 3)
    live = folders.create_pending(tmp_path / "checkpoints" / "step_00000004")
    code = "import sys; from pathlib import Path; from headway.checkpoint.folders import *\n"
    code += "print(lock_project(Path(sys.argv[1])) is None, flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    assert other.stdout.readline() == b"False\n"
    said = f"another run also saves to {tmp_path} (process {other.pid} of "
    checkpoints = Accelerator(cpu=True, project_dir=tmp_path).parts.checkpoints
    for resumed in (True, False):
        train(Path(), 1)
        assert checkpoints.lock_checkpoints(tmp_path) != resumed
        assert folders.leftovers_in(live.parent) == ([live] if resumed else [])
        assert capsys.readouterr().err.count(said) == resumed
        if resumed:
            other.kill()  # however it ends
            other.communicate()


def test_a_project_is_locked_before_the_first_save_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[str] = []

    def write(*args: Any) -> Any:
        held.append((tmp_path / "new" / folders.LOCK).read_text())
        return save_tensors(*args)

    monkeypatch.setattr(saving, "save_tensors", write)
    train(tmp_path / "new", 1)
    assert held[0].startswith(f"process {os.getpid()} of ")


@pytest.mark.parametrize("kind", ["link", "folder", "text"])
def test_a_lock_that_cannot_be_taken_is_reported_and_not_changed(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine := tmp_path / "mine").write_text("precious")
    lock = tmp_path / folders.LOCK
    if kind == "link":
        lock.symlink_to(mine)
    elif kind == "folder":
        lock.mkdir()
    else:
        os.link(mine, lock)
    train(tmp_path, 1)
    assert capsys.readouterr().err.count(f"{lock} cannot be locked: ") == 1
    assert mine.read_text() == "precious"


def test_a_save_that_was_cut_off_and_cannot_be_read_is_named(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints" / "a")
    old = (tmp_path / "checkpoints" / "a").rename(tmp_path / "checkpoints" / ".old-a-0123abcd")
    with broken(old, errno.EIO), pytest.raises(CheckpointError) as caught:
        folders.candidates(tmp_path)
    assert f"move {old} elsewhere" in caught.value.problems[0].fix


def test_no_other_place_takes_an_error_for_an_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "checkpoint-3").mkdir()
    add_to_list(tmp_path, TrainerSave(str(tmp_path / "checkpoint-3")))
    os.makedirs(store.runs_folder())
    (tmp_path / "headway.yaml").write_text("")
    with broken(tmp_path, errno.EIO):
        for call in (
            lambda: [*files_below(tmp_path)],
            lambda: store.names_in(store.runs_folder()),
            record.read_all,
            lambda: find_project_profile(str(tmp_path / "a")),
        ):
            with pytest.raises((OSError, HeadwayError), match=os.strerror(errno.EIO)):
                call()
    with broken(tmp_path / "checkpoint-3", errno.EIO):
        assert [entry.path for entry in read_list(tmp_path)] == [str(tmp_path / "checkpoint-3")]
    assert is_absent(tmp_path / "none")
    assert is_absent(tmp_path / "headway.yaml" / "none")
    assert is_absent("a\0b")
