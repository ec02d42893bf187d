"""A training goes on from its newest checkpoint; one process."""

from __future__ import annotations

import re
import signal
import time
from itertools import pairwise
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import pytest
import torch

from headway import Accelerator
from headway.checkpoint import folders, loading, preemption, saving
from headway.checkpoint.manifest import NAME, read_json, read_manifest
from headway.checkpoint.preemption import ResumedRun
from headway.checkpoint.schedule import RECORD_FILE
from headway.errors import CheckpointError, UsageError
from headway.ipc.progress import process_progress
from headway.utils import ProjectConfiguration
from tests.checkpoint.saved import rewrite
from tests.runtime.resumed_training import (
    BATCH,
    CHECKPOINTS,
    FRESH,
    PROJECT,
    STEPS_PER_EPOCH,
    Training,
    launched,
    names,
)
from tests.trackers.full_disk import no_file_above


def test_the_numbers_go_on_over_several_runs(capsys: pytest.CaptureFixture[str]) -> None:
    training = Training()
    assert training.accelerator.resume() == ResumedRun()
    assert "no checkpoint" in capsys.readouterr().err
    assert training.train_to(4, every=3) == ["step_00000003"]
    for step in (8, 13):
        training = Training()
        run = training.accelerator.resume()
        assert run == ResumedRun(
            epoch=run.step // STEPS_PER_EPOCH,
            step=step - 5 if step == 8 else 6,
            samples=run.step * BATCH,
            checkpoint=str(CHECKPOINTS / f"step_{run.step:08d}"),
        )
        assert str(run.checkpoint) in capsys.readouterr().err
        assert process_progress().step == run.step  # of a failure before the next one
        training.train_to(step, run, every=3)
    assert read_manifest(CHECKPOINTS / "step_00000012").epoch == 2
    training.accelerator.load_state(CHECKPOINTS / "step_00000012")
    with torch.no_grad():
        assert len([*training.loader]) == 3
    assert "an evaluation loop yielded only the batches" in capsys.readouterr().err


def test_a_script_that_changes_the_folder_keeps_its_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    training.train_to(3, every=3)
    (other := tmp_path / "other").mkdir()
    for _ in training.batches():
        training.accelerator.checkpoint(every=1)
    with monkeypatch.context() as patch:
        patch.chdir(other)
        training.accelerator.wait_for_checkpoint()
        training.train_to(training.optimizer.step_count + 1, every=1)
    assert not [*other.iterdir()]
    assert Training().accelerator.resume().step == training.optimizer.step_count


def test_the_launcher_sees_which_call_a_rank_waits_in(monkeypatch: pytest.MonkeyPatch) -> None:
    training, phases = Training(), []
    attempt = saving.attempt

    def noted(step: Any) -> Any:
        phases.append(process_progress().phase)
        return attempt(step)

    monkeypatch.setattr(saving, "attempt", noted)
    accelerator = training.accelerator
    for call in (accelerator.resume, accelerator.checkpoint, lambda: accelerator.should_stop):
        call()
    folder = accelerator.save_state(CHECKPOINTS / "best")
    accelerator.load_state(folder)
    assert list(dict.fromkeys(phases)) == ["resume", "checkpoint", "save_state", "load_state"]
    assert process_progress().phase == "script"


def test_the_newest_is_the_last_one_saved_also_where_the_clock_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training()
    training.train_to(2, every=1)
    now = time.time() - 86400
    monkeypatch.setattr(time, "time", lambda: now)
    for folder in (CHECKPOINTS / "own", PROJECT / "best", CHECKPOINTS / "last"):
        training.accelerator.save_state(folder)
        assert Training().accelerator.resume().checkpoint == str(folder)


def test_a_second_training_in_a_process_knows_its_samples_after_as_many_steps() -> None:
    Training(project_dir="runs/first").train_to(3)
    Training().train_to(3, every=3)
    training = Training()
    assert training.accelerator.resume().samples == 3 * BATCH


def test_the_newest_two_stay_or_as_many_as_the_limit_says() -> None:
    assert Training().train_to(9, every=2) == [f"step_0000000{step}" for step in (2, 4, 6, 8)]
    (PROJECT / "mine.txt").touch()
    kept = Training().accelerator.save_state(CHECKPOINTS / "best")
    assert names() == ["best", "step_00000006", "step_00000008"]
    limited = Training(project_config=ProjectConfiguration(str(PROJECT), total_limit=3))
    run = limited.accelerator.resume()
    assert run.checkpoint == kept, "those of save_state count"
    limited.train_to(3, every=1)
    assert len(names()) == 4


def test_checkpoints_may_be_written_while_training_goes_on_but_for_the_last() -> None:
    training = Training()
    training.accelerator.resume()
    assert len(training.train_to(4, every=1, wait=False)) == 4
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        training.train_to(1000, every=1, wait=False)
    assert names() == ["step_00000004", "step_00000005"]
    training = Training()
    assert training.accelerator.resume().step == 5
    (PROJECT / "checkpoints").rename(PROJECT / "aside")
    (PROJECT / "checkpoints").touch()
    with pytest.raises(CheckpointError, match="checkpoints"):
        training.train_to(7, every=1, wait=False)


def test_a_script_that_forgets_to_resume_does_not_replace_an_earlier_run() -> None:
    Training().train_to(4, every=2)
    forgetful = Training()
    with pytest.raises(CheckpointError, match="earlier run") as error:
        forgetful.train_to(1, every=1)
    assert "resume()" in str(error.value)
    assert names() == ["step_00000002", "step_00000004"]
    with pytest.raises(CheckpointError, match="earlier run"):
        _ = Training().accelerator.should_stop
    project = ProjectConfiguration(str(PROJECT), automatic_checkpoint_naming=True, total_limit=2)
    (CHECKPOINTS / "step_00000002").rename(CHECKPOINTS / "checkpoint_2")
    with pytest.raises(CheckpointError, match="not loaded"):
        Accelerator(cpu=True, project_config=project).save_state()
    by_hand = Training()
    by_hand.accelerator.load_state(CHECKPOINTS / "step_00000004")
    assert by_hand.train_to(6, every=2)[-1] == "step_00000006"


def test_what_is_prepared_after_resume_is_refused_in_the_first_run() -> None:
    accelerator = Accelerator(cpu=True, project_dir=PROJECT)
    run = accelerator.resume()
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    with pytest.raises(UsageError, match="after resume") as error:
        accelerator.checkpoint()
    assert run == FRESH
    assert "prepare()" in str(error.value)
    assert accelerator.resume() == FRESH
    assert accelerator.checkpoint() is not None
    assert model is not None


def test_a_save_in_an_evaluation_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    training = Training()
    training.train_to(3, every=1)
    assert "evaluation" not in capsys.readouterr().err
    for _ in training.test_loader:
        training.accelerator.checkpoint()
    assert capsys.readouterr().err.count("saved during an evaluation") == 1


def test_a_clock_that_is_set_back_makes_no_other_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Training().train_to(2, every=1)
    now = time.time() - 3600
    monkeypatch.setattr(time, "time", lambda: now)
    training = Training()
    training.train_to(4, training.accelerator.resume(), every=1)
    assert "another run" not in capsys.readouterr().err


def test_between_the_micro_batches_of_a_step_nothing_is_saved() -> None:
    training = Training(gradient_accumulation_steps=2)
    training.accelerator.resume()
    seen = []
    for _ in training.steps(epochs=1):
        if training.accelerator.checkpoint(every=1):
            seen.append(training.accelerator.sync_gradients)
    assert seen == [True, True, True]


def test_batches_that_another_thread_reads_ahead_are_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    training, batches = Training(), Queue[Any](maxsize=1)
    training.accelerator.resume()

    def read() -> None:
        for batch in training.loader:
            batches.put(batch)
        batches.put(None)

    reader = Thread(target=read)
    reader.start()
    for step in training.batches(iter(batches.get, None)):
        training.accelerator.checkpoint(every=1)
        assert names()[-1] == f"step_0000000{step}"
    reader.join()
    assert capsys.readouterr().err.count("another thread iterates over a loader") == 1


def test_a_duration_is_as_good_as_a_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    training, saved = Training(), []
    training.accelerator.resume()
    for step in training.steps():
        now[0] += 60  # so slow that the ranks agree in every step
        if training.accelerator.checkpoint(every="5m"):
            saved.append(step)
    assert saved == [5, 10, 15]


@pytest.mark.parametrize("save_s", [1, 10, 100])
def test_auto_saves_at_youngs_interval_for_the_failures_of_this_training(
    save_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, write, is_first = [1000.0], saving.write_prepared, [True]

    def write_slowly(*given: Any) -> None:
        now[0] += save_s * (10 if is_first[0] else 1)  # it imports modules
        is_first[0] = False
        write(*given)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(saving, "write_prepared", write_slowly)

    def seconds_between(num_saves: int) -> list[float]:
        training, times, is_first[0] = Training(), list[float](), True
        for _ in training.steps(training.accelerator.resume(), epochs=1000):
            now[0] += 4 * save_s
            if training.accelerator.checkpoint(every="auto"):
                times.append(now[0])
            if len(times) == num_saves:
                break
        return [until - since for since, until in pairwise(times)]

    usual_s = pytest.approx((2 * save_s * 6 * 3600) ** 0.5, rel=0.2)
    from_start_s = seconds_between(50)  # the first save measures the duration
    assert from_start_s[-3:] == [usual_s] * 3
    for number, seconds in enumerate(from_start_s[:-3], start=1):  # a new run saves more often
        most_s = max(sum(from_start_s[:number]) / 10, 20 * save_s * (10 if number == 1 else 1))
        assert seconds <= most_s + 5 * save_s
    assert seconds_between(5) == [usual_s] * 4  # a run that was started again has not failed
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    after_failure_s = seconds_between(5)
    trained_s = read_json(max(CHECKPOINTS.iterdir()) / RECORD_FILE)["trained_s"]
    assert after_failure_s[3] == pytest.approx((2 * save_s * trained_s) ** 0.5, rel=0.2)


NAN, ODD = float("nan"), torch.tensor(3)


@pytest.mark.parametrize(
    "every", [0, -1, 2.5, "100", "soon", "0m", True, "", "inf", NAN, b"3", ODD]
)
def test_an_interval_that_is_none_is_refused(every: Any) -> None:
    training = Training()
    training.accelerator.checkpoint()
    for _ in range(2):  # nothing is due
        with pytest.raises(UsageError, match=re.escape(repr(every))):
            training.accelerator.checkpoint(every=every)


def test_without_a_project_folder_the_call_says_what_to_do() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UsageError, match="project_dir"):
        accelerator.resume()


# ------------------------------------------------------------------ damage


def test_where_none_is_whole_to_fall_back_on_the_error_says_so() -> None:
    Training().train_to(4, every=2)
    for name in names():
        (CHECKPOINTS / name / "values.json").write_text("{}")
    training = Training()
    with pytest.raises(CheckpointError, match="all 2 checkpoints are damaged") as caught:
        training.accelerator.resume(fall_back=True)
    assert all(name in str(caught.value) for name in names())
    assert str(CHECKPOINTS) in str(caught.value)


def test_where_another_run_saves_and_removes_meanwhile_the_new_one_is_fallen_back_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Training().train_to(1, every=1)
    newest_complete = folders.newest_complete

    def removed(found: Any) -> Any:
        if found[-1].path.name == "step_00000001":
            found[-1].path.rename(CHECKPOINTS / "step_00000002")
        return newest_complete(found)

    monkeypatch.setattr(preemption, "newest_complete", removed)
    training = Training()
    run = training.accelerator.resume(fall_back=True)
    assert run.checkpoint == str(CHECKPOINTS / "step_00000002")


def test_a_checkpoint_that_does_not_fit_is_no_reason_to_fall_back() -> None:
    Training().train_to(3, every=1)
    accelerator = Accelerator(cpu=True, project_dir=PROJECT)
    for options in ({}, {"fall_back": True}):
        with pytest.raises(CheckpointError, match="does not match"):
            accelerator.resume(**options)


def test_a_disk_that_is_full_where_the_runs_of_trackers_are_noted_is_told_with_their_file() -> None:
    with no_file_above(1), pytest.raises(CheckpointError) as caught:
        Training().train_to(1, every=1)
    assert "/trackers.json" in str(caught.value)


@pytest.mark.parametrize("text", ["[]", '{"wandb": 1}', "{"])
def test_runs_of_trackers_that_no_save_has_written_are_refused(text: str) -> None:
    Training().train_to(1, every=1)
    (newest,) = CHECKPOINTS.iterdir()
    (newest / "trackers.json").write_text(text)
    rewrite(newest)
    training = Training()
    accelerator = training.accelerator
    before = [p.detach().clone() for p in training.model.parameters()]
    with pytest.raises(CheckpointError, match=r"it has|cannot be read") as caught:
        accelerator.resume()
    assert str(newest / "trackers.json") in str(caught.value)
    assert all(map(torch.equal, before, training.model.parameters())), "nothing has changed"


def test_a_checkpoint_that_another_run_removes_meanwhile_is_not_to_be_moved_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Training().train_to(1, every=1)
    (newest,) = CHECKPOINTS.iterdir()
    accelerator = Training().accelerator
    load = loading.load_checkpoint

    def removed(*words: Any, **named: Any) -> Any:
        folders.remove(newest)
        return load(*words, **named)

    monkeypatch.setattr(loading, "load_checkpoint", removed)
    with pytest.raises(CheckpointError) as caught:
        accelerator.resume()
    assert str(newest) in caught.value.problems[0].where
    assert str(newest) not in caught.value.problems[0].fix


# ------------------------------------------------------------------ a certain checkpoint


def test_the_script_may_name_the_checkpoint() -> None:
    Training().train_to(5, every=1)
    for named, step in (("latest", 5), (CHECKPOINTS / "step_00000004", 4)):
        accelerator = Training(resume_from=named).accelerator
        assert accelerator.resume().step == step
    for number, folder in enumerate((PROJECT, CHECKPOINTS)):
        training = Training(resume_from=folder, project_dir=f"runs/other{number}")
        assert training.accelerator.resume().checkpoint == str(CHECKPOINTS / "step_00000005")
    with pytest.raises(CheckpointError, match="nowhere"):
        Training(resume_from="nowhere").accelerator.resume()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        Training(resume_from="latest", project_dir="runs/other").accelerator.resume()


def test_the_flag_names_it_too_and_may_not_contradict_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Training().train_to(5, every=1)
    monkeypatch.setenv("HEADWAY_RUN", launched(resume=str(CHECKPOINTS / "step_00000004")))
    accelerator = Training().accelerator
    assert accelerator.resume().step == 4
    with pytest.raises(UsageError, match="--resume"):
        Training(resume_from="latest")


def test_restarted_ranks_go_on_from_what_their_job_has_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Training().train_to(2, every=1)
    asked = {"resume": str(CHECKPOINTS / "step_00000001")}
    ahead, behind = time.time() + 3600, time.time() - 3600  # clocks of machines are set, and differ

    def restarted(began_at: float) -> Training:
        monkeypatch.setenv("HEADWAY_RUN", launched(**asked, began_at=began_at))
        return Training(project_config=ProjectConfiguration(str(PROJECT), total_limit=9))

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for began_at, last, every in ((ahead, 4, 4), (behind, 6, 3)):
        training = restarted(began_at)
        run = training.accelerator.resume()
        assert run.step == 1, "what others have saved does not count, whenever that was"
        training.train_to(last, run, every=every)
    for began_at, last in ((ahead, 4), (behind, 6)):
        assert restarted(began_at).accelerator.resume().step == last
    changed = CHECKPOINTS / "step_00000006" / RECORD_FILE
    changed.write_bytes(changed.read_bytes().replace(b"0", b"1", 1))
    assert restarted(behind).accelerator.resume().step == 6, "only sizes are compared"
    with pytest.raises(CheckpointError, match="checksum"):  # another launch saved it
        restarted(ahead).accelerator.load_state(changed.parent)
    (CHECKPOINTS / "step_00000006" / NAME).write_text("{}")
    with pytest.raises(CheckpointError, match="step_00000006"):
        restarted(behind).accelerator.resume()


def accumulated(project: Path, num_steps: int) -> list[float]:
    accelerator = Accelerator(cpu=True, project_dir=project, gradient_accumulation_steps=4)
    torch.manual_seed(0)
    weights = torch.nn.Linear(4, 1)
    loader: Any = torch.utils.data.DataLoader(torch.randn(200, 4), 4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(
        weights, torch.optim.SGD(weights.parameters(), 0.1), loader
    )
    batches = (batch for _ in range(9) for batch in loader)
    for _ in range(accelerator.resume().step, num_steps):
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(next(batches)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        accelerator.checkpoint(every=5)
    return [weight.item() for weight in weights.weight[0]]


def test_a_batch_that_is_requested_within_accumulate_is_of_the_next_step(tmp_path: Path) -> None:
    whole = accumulated(tmp_path / "whole", 20)
    accumulated(tmp_path / "cut", 13)
    assert accumulated(tmp_path / "cut", 20) == whole
