"""A training resumes where that is requested, from a checkpoint that is listed as complete."""

from __future__ import annotations

import errno
import os
from fnmatch import fnmatch
from pathlib import Path

import pytest

pytest.importorskip("torch")

from headway.errors import CheckpointError
from headway.integrations import resuming
from headway.integrations.resuming import (
    LIST,
    TrainerSave,
    TrainingStart,
    add_to_list,
    read_list,
    select_start,
)
from headway.ipc.run_contract import IF_ANY, LATEST, RunContract

STATE = "trainer_state.json"  # transformers' Trainer writes it last
RUN = RunContract("cpu", "no", 1, origins={}, began_at=100.0)
LATER = RUN._replace(began_at=300.0)


def save(output: Path, step: int, *, owner: str = str(RUN.began_at), number: int = 1) -> str:
    """Save a checkpoint as transformers' Trainer does, and list it."""
    folder = output / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    add_to_list(output, TrainerSave(str(folder), owner, number))
    (folder / STATE).touch()
    return str(folder)


def start(
    output: Path, run: RunContract = LATER, given: str | bool | None = None, number: int = 1
) -> TrainingStart:
    """Return how a training of a new process starts: its first one, or that of this number."""
    resuming._trainings.clear()
    resuming._trainings[str(output)] = number - 1
    return select_start(run, output, given, STATE)


def test_a_command_that_is_typed_again_starts_from_the_beginning(tmp_path: Path) -> None:
    save(tmp_path, 30)
    begun = start(tmp_path)
    assert (begun.path, begun.line) == (None, "")


def test_restarted_ranks_resume_from_what_this_launch_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 900, owner="50.0")
    last = save(tmp_path, 30)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert start(tmp_path, RUN).path == last
    other = start(tmp_path, LATER)
    assert other.path is None, "what another launch has saved is not its"
    assert "restarted before a checkpoint was saved" in other.line
    asked = start(tmp_path, LATER._replace(resume=str(tmp_path / "checkpoint-900")))
    assert asked.path == str(tmp_path / "checkpoint-900"), "as the launch did at first"


@pytest.mark.parametrize("job", ["17", "18"])
def test_a_requeued_job_resumes_from_what_it_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    last = save(tmp_path, 30, owner="17")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    assert start(tmp_path).path is None
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    begun = start(tmp_path)
    assert begun.path == (last if job == "17" else None)
    assert begun.training == TrainerSave("", job, 1)


def test_what_is_asked_for_is_the_last_one_that_is_listed_and_complete(tmp_path: Path) -> None:
    latest, if_any = (LATER._replace(resume=word) for word in (LATEST, IF_ANY))
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        start(tmp_path, latest)
    assert start(tmp_path, if_any).path is None
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-7" / STATE).touch()  # of a run without Headway
    first = save(tmp_path, 40)
    last = save(tmp_path, 30)
    for run in (latest, if_any):
        assert start(tmp_path, run).path == last
    Path(last, STATE).unlink()  # it is being written again
    assert start(tmp_path, latest).path == first
    Path(first, STATE).unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        start(tmp_path, latest)
    named = start(tmp_path, LATER._replace(resume=str(tmp_path / "checkpoint-7")))
    assert named.path == str(tmp_path / "checkpoint-7")


def test_a_folder_that_is_named_is_resumed_from_wherever_it_is(tmp_path: Path) -> None:
    last = save(tmp_path / "other", 20)
    named = LATER._replace(resume=str(tmp_path / "other"))
    assert start(tmp_path / "out", named).path == last
    moved = (tmp_path / "other").rename(tmp_path / "moved")
    assert start(tmp_path, LATER._replace(resume=str(moved))).path == str(moved / "checkpoint-20")
    with pytest.raises(CheckpointError, match="the checkpoint does not exist"):
        start(tmp_path / "out", named)


def test_each_training_of_a_script_resumes_by_itself(tmp_path: Path) -> None:
    latest = LATER._replace(resume=LATEST)
    first = save(tmp_path, 30)
    assert start(tmp_path, latest, number=2).path is None
    second = save(tmp_path, 10, number=2)
    assert start(tmp_path, latest).path == first
    assert start(tmp_path, latest, number=2).path == second
    assert start(tmp_path, LATER._replace(resume=first), number=2).path is None


@pytest.mark.parametrize("given", ["gpt2", True])
def test_what_the_script_passes_wins(tmp_path: Path, given: str | bool) -> None:
    save(tmp_path, 30)
    assert start(tmp_path, LATER._replace(resume=LATEST), given).path == str(given)


def test_the_list_is_not_uploaded_and_lists_only_what_exists(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / "checkpoint-10" / STATE).unlink()
    (tmp_path / "checkpoint-10").rmdir()
    assert [Path(entry.path).name for entry in read_list(tmp_path)] == ["checkpoint-20"]
    add_to_list(tmp_path, TrainerSave(str(tmp_path / "checkpoint-20"), "400"))
    assert [entry.owner for entry in read_list(tmp_path)] == ["400"], "saved again"
    files = [path.name for path in tmp_path.iterdir() if path.is_file()]
    assert files == [LIST]
    assert fnmatch(LIST, "_*"), "as Trainer's push_to_hub chooses files"


def test_a_checkpoint_that_cannot_be_listed_is_told_and_the_list_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 10)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", refuse)
    add_to_list(tmp_path, TrainerSave(str(tmp_path), "1"))
    assert "cannot be listed" in capsys.readouterr().err
    assert len(read_list(tmp_path)) == 1


def test_a_damaged_list_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / LIST).write_text("[")
    with pytest.raises(CheckpointError, match=LIST):
        start(tmp_path, LATER._replace(resume=LATEST))
