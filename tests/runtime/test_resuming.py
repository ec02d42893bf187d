"""A training goes on from its newest checkpoint, and stops without losing anything; one process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from headway import Accelerator
from headway.checkpoint import saving
from headway.checkpoint.manifest import NAME, read_manifest
from headway.contract.origin import Layer, Origin
from headway.contract.records import progress
from headway.contract.run import RunContract, encode
from headway.errors import CheckpointError, UsageError
from headway.resuming import ResumedRun
from headway.stopping import Agreement, Request
from headway.utils import ProjectConfiguration
from tests.checkpoint.saved import rewrite

STEPS_PER_EPOCH, BATCH = 5, 2
FRESH = ResumedRun()
PROJECT = Path("runs/mine")
CHECKPOINTS = PROJECT / "checkpoints"


@pytest.fixture(autouse=True)
def usual_signals() -> Iterator[None]:
    """Let signals do what they did, whatever a test has left."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


class Training:
    """A small training with an evaluation in each epoch, in which nothing is trained."""

    def __init__(self, **options: Any) -> None:
        options = {"project_dir": PROJECT} | options
        self.accelerator = Accelerator(cpu=True, **options)
        model = torch.nn.Linear(2, 1)
        data: Any = torch.arange(2.0 * STEPS_PER_EPOCH * BATCH).reshape(-1, 2)
        self.model, self.optimizer, self.test_loader, self.loader = self.accelerator.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-4),
            DataLoader(data[:3], BATCH),
            DataLoader(data, BATCH, shuffle=True),
        )

    def steps(self, run: ResumedRun = FRESH, epochs: int = 3) -> Iterator[int]:
        for _ in range(run.epoch, epochs):
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(self.model(batch).mean())
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                yield self.optimizer.step_count
                if self.optimizer.step_count % 2:
                    for _ in self.test_loader:
                        pass

    def train_to(self, step: int, run: ResumedRun = FRESH, **options: Any) -> list[str]:
        saved = []
        for done in self.steps(run):
            folder = self.accelerator.checkpoint(**options)
            saved += [] if folder is None else [Path(folder).name]
            if done == step:
                break
        return saved


def names() -> list[str]:
    return sorted(one.name for one in CHECKPOINTS.iterdir())


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
        training.train_to(step, run, every=3)
    assert read_manifest(CHECKPOINTS / "step_00000012").epoch == 2
    training.accelerator.end_training()


def test_the_launcher_sees_which_call_a_rank_waits_in(monkeypatch: pytest.MonkeyPatch) -> None:
    training, phases = Training(), []
    gathered = saving._gather

    def gather(*words: Any) -> Any:
        phases.append(progress().phase)
        return gathered(*words)

    monkeypatch.setattr(saving, "_gather", gather)
    accelerator = training.accelerator
    for call in (accelerator.resume, accelerator.checkpoint, lambda: accelerator.should_stop):
        call()
    folder = accelerator.save_state(CHECKPOINTS / "best")
    accelerator.load_state(folder)
    assert list(dict.fromkeys(phases)) == ["resume", "checkpoint", "save_state", "load_state"]
    assert progress().phase == "script"
    accelerator.end_training()


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
    training.accelerator.end_training()


def test_a_second_training_in_a_process_knows_its_samples_after_as_many_steps() -> None:
    Training(project_dir="runs/first").train_to(3)
    Training().train_to(3, every=3)
    training = Training()
    assert training.accelerator.resume().samples == 3 * BATCH
    training.accelerator.end_training()


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
    limited.accelerator.end_training()


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
    training.accelerator.end_training()


def test_a_script_that_forgets_to_resume_does_not_replace_an_earlier_run() -> None:
    Training().train_to(4, every=2)
    forgetful = Training()
    with pytest.raises(CheckpointError, match="earlier run") as error:
        forgetful.train_to(1, every=1)
    assert "resume()" in str(error.value)
    assert names() == ["step_00000002", "step_00000004"]
    with pytest.raises(CheckpointError, match="earlier run"):
        _ = Training().accelerator.should_stop
    by_hand = Training()
    by_hand.accelerator.load_state(CHECKPOINTS / "step_00000004")
    assert by_hand.train_to(6, every=2)[-1] == "step_00000006"
    by_hand.accelerator.end_training()


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
    accelerator.end_training()


def test_a_save_in_an_evaluation_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    training = Training()
    training.train_to(3, every=1)
    assert "evaluation" not in capsys.readouterr().err
    for _ in training.test_loader:
        training.accelerator.checkpoint()
    assert capsys.readouterr().err.count("evaluation") == 1
    training.accelerator.end_training()


def test_two_runs_in_one_project_folder_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    Training().train_to(2, every=1)
    one, other = Training(), Training()
    runs = [training.accelerator.resume() for training in (one, other)]
    one.train_to(4, runs[0], every=1)
    assert "another run" not in capsys.readouterr().err
    other.train_to(5, runs[1], every=1)
    assert capsys.readouterr().err.count("another run") == 1
    one.accelerator.end_training()


def test_between_the_micro_batches_of_a_step_nothing_is_saved() -> None:
    training = Training(gradient_accumulation_steps=2)
    training.accelerator.resume()
    seen = []
    for _ in training.steps(epochs=1):
        if training.accelerator.checkpoint(every=1):
            seen.append(training.accelerator.sync_gradients)
    assert seen == [True, True, True]
    training.accelerator.end_training()


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
    training.accelerator.end_training()


@pytest.mark.parametrize("every", [0, -1, 2.5, "soon", "0m", True])
def test_an_interval_that_is_none_is_refused(every: Any) -> None:
    training = Training()
    with pytest.raises(UsageError, match=re.escape(repr(every))):
        training.accelerator.checkpoint(every=every)
    training.accelerator.end_training()


def test_without_a_project_folder_or_an_optimizer_the_call_says_what_to_do() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UsageError, match="project_dir"):
        accelerator.resume()
    with pytest.raises(UsageError, match="project_dir"):
        accelerator.checkpoint()
    with pytest.raises(UsageError, match="no optimizer"):
        Accelerator(cpu=True, project_dir=PROJECT).checkpoint(every=1)
    accelerator.end_training()


# ------------------------------------------------------------------ damage


@pytest.mark.parametrize("damaged", [NAME, "values.json"])
def test_a_damaged_newest_checkpoint_is_named_and_left_out_only_when_asked(
    damaged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Training().train_to(7, every=3)
    (CHECKPOINTS / "step_00000006" / damaged).write_text("{}")
    training = Training()
    with pytest.raises(CheckpointError) as caught:
        training.accelerator.resume()
    (problem,) = caught.value.problems
    assert "step_00000006" in problem.where
    assert "fall_back=True" in problem.fix
    assert "step_00000003" in problem.fix
    assert training.accelerator.resume(fall_back=True).step == 3
    assert "step_00000006" in capsys.readouterr().err
    training.accelerator.end_training()


def test_where_none_is_whole_to_fall_back_on_the_error_says_so() -> None:
    Training().train_to(4, every=2)
    for name in names():
        (CHECKPOINTS / name / "values.json").write_text("{}")
    training = Training()
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints is whole") as caught:
        training.accelerator.resume(fall_back=True)
    assert all(name in str(caught.value) for name in names())
    assert str(CHECKPOINTS) in str(caught.value)
    training.accelerator.end_training()


def test_a_checkpoint_that_does_not_fit_is_no_reason_to_fall_back() -> None:
    Training().train_to(3, every=1)
    accelerator = Accelerator(cpu=True, project_dir=PROJECT)
    for options in ({}, {"fall_back": True}):
        with pytest.raises(CheckpointError, match="does not fit"):
            accelerator.resume(**options)
    accelerator.end_training()


def test_what_a_killed_save_has_left_is_removed_once_nobody_writes_there() -> None:
    Training().train_to(1, every=1)
    fresh, old = (CHECKPOINTS / f".tmp-step_0000000{number}-aaaaaaaa" for number in (2, 3))
    for folder in (fresh, old):
        folder.mkdir()
        (folder / "part").touch()
    long_ago = time.time() - 3600
    for path in (old / "part", old):
        os.utime(path, (long_ago, long_ago))
    accelerator = Training().accelerator
    accelerator.resume()
    assert fresh.exists()
    assert not old.exists()
    accelerator.end_training()


@pytest.mark.parametrize("text", ["[]", '{"wandb": 1}', "{"])
def test_runs_of_trackers_that_no_save_has_written_are_refused(text: str) -> None:
    Training().train_to(1, every=1)
    (newest,) = CHECKPOINTS.iterdir()
    (newest / "trackers.json").write_text(text)
    rewrite(newest)
    accelerator = Training().accelerator
    with pytest.raises(CheckpointError, match="runs of trackers") as caught:
        accelerator.resume()
    assert str(newest / "trackers.json") in str(caught.value)
    accelerator.end_training()


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
    Training().accelerator.end_training()


def launched(**fields: Any) -> str:
    origins = {"resume": Origin(Layer.FLAG, flag="--resume")}
    return encode(RunContract("cpu", "no", 1, origins, **fields))


def test_the_flag_names_it_too_and_may_not_contradict_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Training().train_to(5, every=1)
    monkeypatch.setenv("HEADWAY_RUN", launched(resume=str(CHECKPOINTS / "step_00000004")))
    accelerator = Training().accelerator
    assert accelerator.resume().step == 4
    with pytest.raises(UsageError, match="--resume"):
        Training(resume_from="latest")
    accelerator.end_training()


def test_restarted_ranks_go_on_from_what_their_job_has_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Training().train_to(5, every=1)
    asked = {"resume": str(CHECKPOINTS / "step_00000004")}
    monkeypatch.setenv("HEADWAY_RUN", launched(**asked, began_at=time.time() + 1))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    accelerator = Training().accelerator
    assert accelerator.resume().step == 4, "the others are of another job"
    monkeypatch.setenv("HEADWAY_RUN", launched(**asked, began_at=time.time() - 3600))
    assert Training().accelerator.resume().step == 5
    accelerator.end_training()
    Training().accelerator.end_training()


# ------------------------------------------------------------------ stopping


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_signal_saves_and_leaves_after_the_step(
    number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    training, heard = Training(), []
    before = signal.getsignal(number)
    signal.signal(signal.SIGUSR1, lambda *_: heard.append("own"))
    training.accelerator.resume()
    training.train_to(3, every="1h")
    signal.raise_signal(number)
    with pytest.raises(SystemExit) as caught:
        training.train_to(1000, every="1h")
    assert caught.value.code == code
    (name,) = names()
    assert name in capsys.readouterr().err
    assert heard == ["own"] * (number == signal.SIGUSR1), "the script's own handler is called too"
    assert number != signal.SIGINT or signal.getsignal(number) == before
    for again in (signal.SIGTERM, signal.SIGUSR1):
        signal.raise_signal(again)  # it is leaving already
    with pytest.raises(SystemExit):  # also where the script has caught the first one
        training.accelerator.checkpoint(every="1h")


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    training = Training()
    training.accelerator.resume()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    training.accelerator.end_training()


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    accelerator = Training().accelerator
    accelerator.resume()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    accelerator.end_training()


def test_a_loop_of_another_shape_asks_and_saves_itself() -> None:
    accelerator = Accelerator(cpu=True, project_dir=PROJECT)
    accelerator.prepare(torch.nn.Linear(2, 1))
    assert not accelerator.should_stop
    signal.raise_signal(signal.SIGTERM)
    assert any(accelerator.should_stop for _ in range(100))
    with pytest.raises(SystemExit) as caught:
        accelerator.checkpoint()
    assert caught.value.code == 75
    assert names() == ["step_00000000"]


def test_where_nobody_asks_a_signal_does_what_it_did_before_resume(
    capfd: pytest.CaptureFixture[str],
) -> None:
    training, before = Training(), signal.getsignal(signal.SIGTERM)
    training.accelerator.resume()
    assert signal.getsignal(signal.SIGTERM) != before
    signal.raise_signal(signal.SIGINT)
    steps = training.steps()
    assert next(steps) == 1
    assert signal.getsignal(signal.SIGTERM) != before, "the first step is not over"
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert "not saved" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before
    training.accelerator.save_state(CHECKPOINTS / "own")
    assert not training.accelerator.should_stop
    assert signal.getsignal(signal.SIGTERM) != before, "from here on the script asks"
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        training.train_to(1000, every="1h")


def test_where_somebody_asks_signals_are_noted_over_many_steps() -> None:
    training = Training()
    training.accelerator.resume()
    training.train_to(9, every=1000)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        training.train_to(1000, every=1000)
    own = Training(project_dir="runs/own")
    own.accelerator.resume()
    signal.signal(signal.SIGTERM, lambda *_: heard.append("own"))
    heard: list[str] = []
    for _ in zip(own.steps(), range(4), strict=False):
        signal.raise_signal(signal.SIGTERM)
    assert heard == ["own"] * 4, "a handler that the script has set is called once for each"


@pytest.mark.parametrize("resumes", [True, False])
def test_a_time_limit_that_nobody_asks_for_is_told_when_it_has_passed(
    resumes: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setenv("HEADWAY_RUN", launched(began_at=now[0], time_limit=200))
    training = Training()
    if resumes:
        training.accelerator.resume()
    for step in training.steps():
        now[0] += 100
        assert capsys.readouterr().err.count("time_limit=200") == (step == 3)
    with pytest.raises(SystemExit):
        Training().train_to(4, every=100)
    assert "time_limit=" not in capsys.readouterr().err
    training.accelerator.end_training()


def test_the_time_limit_counts_from_the_beginning_of_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADWAY_RUN", launched(began_at=time.time() - 100, time_limit=200))
    training = Training()
    training.accelerator.resume()
    assert training.train_to(2, every="1h") == []
    monkeypatch.setenv("HEADWAY_RUN", launched(began_at=time.time() - 300, time_limit=200))
    stopped = Training()
    with pytest.raises(SystemExit) as caught:
        stopped.train_to(2, every="1h")
    assert caught.value.code == 75
    assert names() == ["step_00000001"]
    training.accelerator.end_training()


def test_ranks_agree_twice_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    agreement, units, times = Agreement(torch.device("cpu")), 0, []
    for _ in range(30):
        now[0] += 0.001 * units
        times.append(now[0])
        units = agreement.agree(Request.NONE, False, units).following
    gaps = [later - earlier for earlier, later in pairwise(times[5:])]
    assert gaps == pytest.approx([0.5] * len(gaps), rel=0.01)
    now[0] += 10 * units  # the steps have become slow
    assert agreement.agree(Request.NONE, False, units).following == 1


@pytest.mark.processes
def test_one_process_without_a_launcher_says_that_its_script_has_not_looked() -> None:
    text = "from headway import Accelerator; Accelerator(cpu=True); Accelerator(cpu=True)"
    variables = {"HEADWAY_RUN": launched(time_limit=60)}
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.count("time_limit=60 had no effect") == 1
