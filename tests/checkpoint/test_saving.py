"""A checkpoint is saved by one process, at once or while training goes on; failures are told."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: E402
from torch.distributed.checkpoint.metadata import Metadata  # noqa: E402

from headway.accelerator import Accelerator  # noqa: E402
from headway.checkpoint import background, saving  # noqa: E402
from headway.checkpoint.folders import checkpoints_in, leftovers_in  # noqa: E402
from headway.checkpoint.loading import load_checkpoint  # noqa: E402
from headway.checkpoint.manifest import unlisted_files, verify  # noqa: E402
from headway.checkpoint.saving import CheckpointProgress, Contents  # noqa: E402
from headway.checkpoint.tensors import save_tensors  # noqa: E402
from headway.errors import CheckpointError  # noqa: E402
from headway.ipc.progress import WRITER  # noqa: E402
from headway.trackers.project import ProjectConfiguration  # noqa: E402
from tests.checkpoint.saving import save_checkpoint  # noqa: E402
from tests.distributed.launching import environment, run, script  # noqa: E402


@pytest.fixture
def accelerator(tmp_path: Path) -> Any:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=project)
    yield accelerator
    accelerator.end_training()


@pytest.mark.processes
def test_a_fork_waits_for_the_first_write_which_calls_operators_for_the_first_time(
    accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, may_write, write = list[int](), threading.Event(), save_tensors

    def when_it_may(*args: Any) -> Any:
        assert may_write.wait(60)
        result = write(*args)
        written.append(1)
        return result

    monkeypatch.setattr(saving, "save_tensors", when_it_may)
    accelerator.prepare(torch.nn.Linear(3, 2))
    for is_first in (True, False):
        may_write.clear()
        accelerator.save_state(wait=False)
        timer = threading.Timer(0.2 if is_first else 60, may_write.set)
        timer.start()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        assert len(written) == 1, "the second write has not ended yet"
        timer.cancel()
        may_write.set()
        timer.join()
        accelerator.wait_for_checkpoint()


def test_what_changes_after_the_call_does_not_reach_the_checkpoint(
    accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = accelerator.prepare(torch.nn.Linear(3, 2))
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    held, write = torch.nn.Parameter(torch.zeros(1)), save_tensors
    addresses = []

    def change_first(tensors: Any, *others: Any) -> Any:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)
            held.fill_(7)
        addresses.append([tensor.data_ptr() for tensor in tensors.values()])
        return write(tensors, *others)

    monkeypatch.setattr(saving, "save_tensors", change_first)
    for step in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        before = {name: t.clone() for name, t in model.state_dict().items()}
        folder = Path(accelerator.save_state(wait=False))
        accelerator.wait_for_checkpoint()
        saved = load_checkpoint(folder).shared["models"][0]
        assert held == 7
        assert all(torch.equal(saved[name], t) for name, t in before.items())
        assert [verify(c.path).step for c in checkpoints_in(folder.parent)] == [step + 1]
    assert addresses[0] == addresses[1]


def test_a_write_of_many_tensors_pauses_until_it_is_waited_for(
    accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_PAUSE_S", 600.0)
    accelerator.prepare(torch.nn.ParameterList([torch.ones(1) for _ in range(300)]))
    folder = Path(accelerator.save_state(wait=False))
    [writer] = (t for t in threading.enumerate() if t.name == WRITER)
    writer.join(1)
    assert writer.is_alive()
    assert checkpoints_in(folder.parent) == []
    accelerator.wait_for_checkpoint()
    assert [checkpoint.path for checkpoint in checkpoints_in(folder.parent)] == [folder]


@pytest.mark.parametrize("how", ["wait", "save", "load", "end"])
def test_a_failure_is_raised_where_the_script_waits_next_and_only_there(
    how: str, accelerator: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = accelerator.save_state()
    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_tensors", fail)
        accelerator.save_state(wait=False)
        for thread in threading.enumerate():
            if thread.name == WRITER:
                thread.join()
    wait = {
        "wait": accelerator.wait_for_checkpoint,
        "save": accelerator.save_state,
        "load": accelerator.load_state,
        "end": accelerator.end_training,
    }[how]
    with pytest.raises(CheckpointError) as caught:
        wait()
    assert "there" in caught.value.problems[0].where
    assert [str(checkpoint.path) for checkpoint in checkpoints_in(Path(first).parent)] == [first]
    assert leftovers_in(Path(first).parent) == []
    assert gc.isenabled(), "it is paused during a save and a load only"
    wait()


def test_resume_waits_for_a_save_of_its_own_run(
    accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_late(*words: Any) -> Any:
        sleep(0.5)
        return save_tensors(*words)

    monkeypatch.setattr(saving, "save_tensors", write_late)
    accelerator.prepare(torch.nn.Linear(3, 2))
    folder = accelerator.save_state(wait=False)
    assert accelerator.resume().checkpoint == folder


def fail(*_: object) -> None:
    raise CheckpointError("the disk is full", where="there", fix="make space", code=None)


SCRIPT = """
import atexit
from headway.checkpoint import saving
from tests.checkpoint.test_saving import fail
from tests.runtime.resumed_training import Training
atexit.register(print, "another exit handler")
training = Training(project_dir="two")
training.accelerator.resume()
training.accelerator.save_state("one")
saving.save_tensors = fail
"""
ENDS = [
    'training.accelerator.save_state("two/step", wait=False)',
    "batches = training.batches()\nnext(batches)\ntraining.accelerator.checkpoint(every=1)",  # due
]


@pytest.mark.processes
@pytest.mark.usefixtures("warm_pythons")
@pytest.mark.parametrize("end", ENDS)
def test_a_failure_that_nobody_has_waited_for_ends_the_script_with_its_error(end: str) -> None:
    done = run([sys.executable, script(SCRIPT + end)], environment(), timeout_s=120)
    assert done.returncode == CheckpointError.exit_code
    assert "error:" in done.stderr
    assert "there" in done.stderr
    assert done.stdout == "another exit handler\n"
    assert Path("one").exists()
    assert not [path for path in Path("two").rglob("*") if "step" in path.name]


WEIGHT = torch.arange(6.0).reshape(2, 3)
STATE = Contents(
    {"model": {"weight": WEIGHT, "lr": 0.1}}, {"random": [1, 2], "states": torch.ones(3)}
)


def save(
    target: Path, state: Contents = STATE, *, hook: Callable[[Path], object] = str, **options: Any
) -> None:
    def state_of(folder: Path) -> Contents:
        hook(folder)
        return state

    save_checkpoint(target, state_of, CheckpointProgress(7, 1), **options)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a")

    def replace(_: str, saved: Any, was_sharded: bool) -> Any:
        save(tmp_path / "a", Contents({"model": {"weight": WEIGHT + 1, "lr": 0.2}}, STATE.own))
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


def run_out_of_space(_: Path) -> None:
    raise OSError(28, "No space left on device", "somewhere")


@pytest.mark.parametrize("failure", ["object", "hook"])
def test_a_save_that_fails_leaves_the_checkpoint_before_it_and_nothing_else(
    failure: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    save(folder / "a")
    before = verify(folder / "a")
    state = Contents({"model": object()}, {}) if failure == "object" else STATE
    with pytest.raises(CheckpointError):
        save(folder / "a", state, hook=run_out_of_space if failure == "hook" else str)
    assert verify(folder / "a") == before
    assert len(checkpoints_in(folder)) == 1
    assert leftovers_in(folder) == []


def test_the_index_comes_from_what_was_written_and_not_from_what_dcp_does_to_its_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = FileSystemWriter.finish

    def finish(self: Any, metadata: Metadata, results: Any) -> None:  # as that of torch 2.11
        usual(self, replace(metadata), results)

    monkeypatch.setattr(FileSystemWriter, "finish", finish)
    save(tmp_path / "a")
    assert torch.equal(load_checkpoint(tmp_path / "a").shared["model"]["weight"], WEIGHT)


def test_an_error_in_the_code_is_not_called_one_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TypeError("not subscriptable")

    monkeypatch.setattr(FileSystemWriter, "finish", fail)
    with pytest.raises(CheckpointException, match=r"in fail[^$]*TypeError: not subscriptable"):
        save(tmp_path / "a")


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_a_folder_whose_place_no_checkpoint_can_take_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="must end with a folder name"):
        save(Path(name))
    assert sorted(tmp_path.iterdir()) == before
