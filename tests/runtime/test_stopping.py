"""A training stops at a signal or a time limit, without losing anything; one process."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest
import torch

from headway import Accelerator
from headway.stopping import Agreement, Request
from tests.runtime.resumed_training import (
    CHECKPOINTS,
    PROJECT,
    Training,
    launched,
    names,
)


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


class Unread(io.StringIO):
    """A stream whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_signal_saves_and_leaves_where_nobody_reads_stderr_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training()
    training.accelerator.resume()
    training.train_to(3, every="1h")
    monkeypatch.setattr(sys, "stderr", Unread())
    kept, (reading, writing) = os.dup(2), os.pipe()
    os.close(reading)
    os.dup2(writing, 2)
    try:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as caught:
            training.train_to(1000, every="1h")
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(writing)
    assert caught.value.code == 75
    assert len(names()) == 1


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
    for clock in ("time", "monotonic"):
        monkeypatch.setattr(time, clock, lambda: now[0])
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


def test_a_clock_that_is_set_back_does_not_put_off_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADWAY_RUN", launched(began_at=time.time() - 300, time_limit=200))
    training, now = Training(), time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    with pytest.raises(SystemExit) as caught:
        training.train_to(2, every="1h")
    assert caught.value.code == 75


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
