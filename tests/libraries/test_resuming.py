"""A training goes on when the same one is run again, and begins anew when it is typed again."""

from __future__ import annotations

import errno
import json
import os
from fnmatch import fnmatch
from pathlib import Path

import pytest

pytest.importorskip("torch")

from headway.checkpoint.stopping import Request
from headway.contract.run import IF_ANY, LATEST, RunContract
from headway.errors import CheckpointError
from headway.libraries import resuming
from headway.libraries.folders import RECORD, trainer_checkpoints, trainer_fault
from headway.libraries.resuming import (
    Checkpoints,
    Start,
    Training,
    note_stop,
    read_record,
    select_start,
    write_record,
)
from tests.libraries.saved import cut, save

RUN = RunContract("cpu", "no", 1, origins={}, began_at=100.0)
BEGAN = 110.0


def start(
    output: Path, run: RunContract = RUN, given: str | bool | None = None, number: int = 1
) -> Start:
    """Return how the so-manieth training of a new process starts."""
    resuming._trainings.clear()
    resuming._trainings[str(output)] = number - 1
    return select_start(run, output, given, Checkpoints(trainer_checkpoints, trainer_fault))


def interrupted(output: Path, stopped_by: str = "", job: str = "", number: int = 1) -> Training:
    """Leave a training that has saved two checkpoints, beside an older run's of more steps."""
    training = Training(RUN.began_at, job, number, BEGAN, stopped_by)
    write_record(output, training)
    save(output, 900, 50.0)
    save(output, 20, BEGAN + 20)
    save(output, 30, BEGAN + 10)  # as where all were copied
    return training


def test_a_run_that_is_typed_again_begins_anew(tmp_path: Path) -> None:
    interrupted(tmp_path)
    begun = start(tmp_path)
    assert (begun.path, begun.lines) == (None, ())
    assert write_record(tmp_path, begun.training).began_at > BEGAN, "it is another training"


def test_ranks_that_are_restarted_go_on_from_what_this_launch_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = interrupted(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    begun = start(tmp_path)
    assert begun.path == str(tmp_path / "checkpoint-30")
    assert begun.training == training
    assert start(tmp_path, RUN._replace(began_at=200.0)).path is None, "another launch"
    for step in (20, 30):
        cut(tmp_path / f"checkpoint-{step}" / "optimizer.pt")
    begun = start(tmp_path)
    assert begun.path is None, "what is of another run is not taken"
    assert ["checkpoint-30" in begun.lines[0], "checkpoint-20" in begun.lines[1]] == [True, True]
    assert (tmp_path / "checkpoint-30").exists()
    asked = start(tmp_path, RUN._replace(resume=str(tmp_path / "checkpoint-900")))
    assert asked.path == str(tmp_path / "checkpoint-900"), "as the launch did at first"


@pytest.mark.parametrize("job", ["17", "18"])
def test_a_job_that_is_put_back_goes_on_and_another_one_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    interrupted(tmp_path, job="17")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    begun = start(tmp_path, RUN._replace(began_at=300.0))
    own = job == "17"
    assert begun.path == (str(tmp_path / "checkpoint-30") if own else None)
    assert begun.training == Training(300.0, job, 1, BEGAN if own else 0.0)


def test_a_training_that_was_stopped_to_be_run_again_goes_on_once(tmp_path: Path) -> None:
    interrupted(tmp_path, stopped_by="SIGTERM")
    begun = start(tmp_path, RUN._replace(began_at=300.0))
    assert begun.path == str(tmp_path / "checkpoint-30")
    assert "SIGTERM" in begun.lines[-1]
    write_record(tmp_path, begun.training)
    assert start(tmp_path).path is None, "it was typed again after that"


def test_a_stop_that_cannot_be_noted_on_a_full_disk_is_told_and_nothing_else_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(100.0)
    assert not note_stop(tmp_path, training, Request.SIGINT), "Ctrl-C ends it for good"
    assert note_stop(tmp_path, training, Request.SIGTERM)
    noted = read_record(tmp_path)
    assert noted is not None
    assert noted.stopped_by == "SIGTERM"

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(json, "dump", refuse)
    assert not note_stop(tmp_path, training, Request.SIGTERM)
    assert "cannot be written: No space left" in capsys.readouterr().err


def test_what_was_being_written_is_passed_over_by_name(tmp_path: Path) -> None:
    interrupted(tmp_path, stopped_by="SIGTERM")
    cut(tmp_path / "checkpoint-30" / "model.safetensors")
    begun = start(tmp_path)
    assert begun.path == str(tmp_path / "checkpoint-20")
    assert "checkpoint-30" in begun.lines[0]
    assert "model.safetensors" in begun.lines[0]


def test_the_newest_of_all_is_what_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        start(tmp_path, RUN._replace(resume=LATEST))
    assert start(tmp_path, RUN._replace(resume=IF_ANY)).path is None
    save(tmp_path, 7, 50.0)  # of a run without Headway
    for word in (LATEST, IF_ANY):
        begun = start(tmp_path, RUN._replace(resume=word))
        assert begun.path == str(tmp_path / "checkpoint-7")
    cut(tmp_path / "checkpoint-7" / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"checkpoint-7.*optimizer\.pt"):
        start(tmp_path, RUN._replace(resume=LATEST))
    assert "checkpoint-7" in start(tmp_path, RUN._replace(resume=IF_ANY)).lines[0]


@pytest.mark.parametrize("named", ["", "checkpoint-20"])
def test_a_folder_that_is_named_is_gone_on_from_wherever_it_is(tmp_path: Path, named: str) -> None:
    other = tmp_path / "other"
    interrupted(other)
    begun = start(tmp_path / "out", RUN._replace(resume=str(other / named)))
    # without a record here, the one of the most steps is the last one, as Trainer has it
    assert begun.path == str(other / (named or "checkpoint-900"))
    assert begun.training.began_at == 0.0


def test_the_last_one_of_a_training_comes_before_those_of_an_older_run(tmp_path: Path) -> None:
    interrupted(tmp_path)
    begun = start(tmp_path, RUN._replace(resume=LATEST))
    assert begun.path == str(tmp_path / "checkpoint-30")
    assert begun.training.began_at == BEGAN, "a restart finds what it has saved"


def test_each_training_of_a_script_goes_on_by_itself(tmp_path: Path) -> None:
    interrupted(tmp_path, stopped_by="SIGTERM", number=2)
    assert start(tmp_path).path is None, "the end of the second is no beginning of the first"
    assert start(tmp_path, number=2).path == str(tmp_path / "checkpoint-30")
    latest = RUN._replace(resume=LATEST)
    write_record(tmp_path, Training(100.0, "", 1, BEGAN))
    assert start(tmp_path, latest, number=2).path is None, "nor the other way round"


def test_what_the_script_passes_wins(tmp_path: Path) -> None:
    interrupted(tmp_path)
    latest = RUN._replace(resume=LATEST)
    asked = start(tmp_path, latest, str(tmp_path / "checkpoint-900"))
    assert (asked.path, asked.training.began_at) == (str(tmp_path / "checkpoint-900"), 0.0)
    asked = start(tmp_path, latest, str(tmp_path / "checkpoint-20"))
    assert (asked.path, asked.training.began_at) == (str(tmp_path / "checkpoint-20"), BEGAN)
    assert start(tmp_path, latest, "gpt2").path == "gpt2", "whatever it is"
    assert start(tmp_path, RUN, True).path == str(tmp_path / "checkpoint-30")


def test_a_script_that_passes_its_last_folder_does_not_go_on_from_a_partial_one(
    tmp_path: Path,
) -> None:
    interrupted(tmp_path)
    partial = tmp_path / "checkpoint-30"
    cut(partial / "optimizer.pt")
    for given in (True, str(partial)):
        begun = start(tmp_path, RUN, given)
        assert begun.path == str(tmp_path / "checkpoint-20")
        assert "checkpoint-30" in begun.lines[0]
    elsewhere = start(tmp_path / "out", RUN, str(partial))
    assert elsewhere.path == str(partial), "there is no other"
    assert "optimizer.pt" in elsewhere.lines[0]
    for step in (20, 900):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").unlink()
    assert start(tmp_path, RUN, str(partial)).path is None


def test_the_record_is_not_uploaded_with_the_model(tmp_path: Path) -> None:
    output = tmp_path / "out"
    write_record(output, Training(100.0))
    uploaded = [one.name for one in output.iterdir() if not fnmatch(one.name, "_*")]
    assert not uploaded, "as Trainer's push_to_hub chooses files"


def test_a_record_that_was_cut_off_is_as_none_and_is_never_half_written(tmp_path: Path) -> None:
    interrupted(tmp_path, stopped_by="SIGTERM")
    assert [path.name for path in tmp_path.glob("*headway*")] == [RECORD]
    cut(tmp_path / RECORD)
    assert read_record(tmp_path) is None
    assert start(tmp_path).path is None
