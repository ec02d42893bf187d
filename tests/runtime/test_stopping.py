"""A training stops at a signal or a time limit, without losing anything; one process."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import time
from itertools import pairwise
from typing import Any

import pytest
import torch

from headway import Accelerator
from headway.checkpoint import stopping
from headway.checkpoint.stopping import Agreement, StopRequest, StopSignals
from headway.ipc.records import WillSave
from tests.distributed.launching import environment, run, script
from tests.runtime.resumed_training import CHECKPOINTS, PROJECT, Training, launched, names


@pytest.mark.parametrize(
    ("number", "code"),
    [
        *((signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGHUP, 75), (signal.SIGXCPU, 75)),
        (signal.SIGINT, 130),
    ],
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
    said = rf"stopped by {number.name} after step \d+; saved .*{name}"
    assert re.search(said, capsys.readouterr().err)
    assert heard == ["own"] * (number == signal.SIGUSR1), "the script's own handler is called too"
    assert number != signal.SIGINT or signal.getsignal(number) == before
    for again in (signal.SIGTERM, signal.SIGUSR1):
        signal.raise_signal(again)  # it is leaving already
    with pytest.raises(SystemExit):  # also where the script has caught the first one
        training.accelerator.checkpoint(every="1h")


class Reported:
    """The progress of a rank, as far as its handlers of stop signals need it."""

    is_connected = True

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.send = self.sent.append

    def note_use(self, **_: bool) -> None:
        pass


def test_a_rank_saves_when_it_is_stopped_until_its_handlers_are_released() -> None:
    progress: Any = Reported()
    stopping = StopSignals(progress)
    before = signal.getsignal(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # as by the process's parent
    stopping.trap()
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert signal.getsignal(signal.SIGTERM) != before
    stopping.release()
    assert signal.getsignal(signal.SIGTERM) == before
    assert progress.sent == [WillSave(), WillSave(False)]


@pytest.mark.parametrize(
    ("size", "step"), [(1, "the next step"), (2, "the next step that all ranks agree on")]
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_a_signal_leads_to_is_said_without_a_promise_that_another_rank_may_break(
    size: int,
    step: str,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(stopping, "rank_and_size", lambda: (0, size))
    progress: Any = Reported()
    signals = StopSignals(progress)
    signals.trap()
    signal.raise_signal(number)
    signals.release()
    said = f"{number.name}: requested to save and stop after {step}"
    again = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
    assert f"{said}{again}\n" in capfd.readouterr().err


def test_a_signal_after_the_last_checkpoint_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    training = Training()
    training.train_to(2, every="1h")
    signal.raise_signal(signal.SIGTERM)
    training.accelerator.end_training()
    assert "SIGTERM arrived after the last checkpoint()" in capfd.readouterr().err


def test_a_script_handler_that_exits_prevents_a_save(capfd: pytest.CaptureFixture[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Training().train_to(1, every="1h")
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    assert "SIGTERM: not saving: the script's own handler raised" in capfd.readouterr().err


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
    training.train_to(1, every="1h")
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_with_a_launcher_a_second_ctrl_c_is_the_forwarded_first_one() -> None:
    progress: Any = Reported()
    signals = StopSignals(progress)
    signals.trap()
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)
    assert signals.request is StopRequest.SIGINT
    signals.release()


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    training = Training()
    training.train_to(1, every="1h")
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


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


def test_a_signal_is_noted_from_the_first_time_that_the_script_asks() -> None:
    training, before = Training(), signal.getsignal(signal.SIGTERM)
    training.accelerator.resume()
    training.accelerator.save_state(CHECKPOINTS / "own")
    assert signal.getsignal(signal.SIGTERM) == before
    assert not training.accelerator.should_stop
    assert signal.getsignal(signal.SIGTERM) != before
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        training.train_to(1000, every="1h")


def test_where_somebody_asks_signals_are_noted_over_many_steps() -> None:
    training = Training()
    training.accelerator.resume()
    training.train_to(9, every=1000)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit):  # noqa: PT012
        for _ in range(100):  # ranks agree every half second
            training.train_to(1000, every=1000)
    own = Training(project_dir="runs/own")
    own.accelerator.resume()
    signal.signal(signal.SIGTERM, lambda *_: heard.append("own"))
    heard: list[str] = []
    for _ in zip(own.steps(), range(4), strict=False):
        signal.raise_signal(signal.SIGTERM)
    assert heard == ["own"] * 4, "a handler that the script has set is called once for each"


def test_the_time_limit_counts_from_the_beginning_of_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADWAY_RUN", launched(began_at=time.time() - 100, time_limit=200))
    training = Training()
    training.accelerator.resume()
    assert training.train_to(2, every="1h") == []
    monkeypatch.setenv("HEADWAY_RUN", launched(began_at=time.time() - 300, time_limit=200))
    stopped, now = Training(), time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)  # is set back
    with pytest.raises(SystemExit) as caught:
        stopped.train_to(2, every="1h")
    assert caught.value.code == 75
    assert names() == ["step_00000001"]


def test_ranks_agree_twice_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    agreement, unit, units, times = Agreement(torch.device("cpu")), 0, 0, []
    for _ in range(30):
        now[0] += 0.001 * units
        times.append(now[0])
        agreement.agree(unit, StopRequest.NONE)
        units, unit = agreement.next_at - unit, agreement.next_at
    gaps = [later - earlier for earlier, later in pairwise(times[12:])]
    assert gaps == pytest.approx([0.5] * len(gaps), rel=0.01)
    now[0] += 10 * units  # the steps have become slow
    agreement.agree(unit, StopRequest.NONE)
    assert agreement.next_at == unit + 1


@pytest.mark.parametrize("interval_s", [0.1, 0.45, 3.0])
def test_ranks_agree_when_a_save_is_due(monkeypatch: pytest.MonkeyPatch, interval_s: float) -> None:
    now, saved_at = 0.0, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now)
    agreement = Agreement(torch.device("cpu"))
    for step in range(1000):
        now = 0.02 * step
        if step >= agreement.next_at:
            due_in_s = saved_at[-1] + interval_s - now
            _, is_due = agreement.agree(step, StopRequest.NONE, due_in_s=due_in_s)
            saved_at += [now] * is_due
    gaps = [later - earlier for earlier, later in pairwise(saved_at[2:])]
    assert gaps
    assert max(gaps) <= interval_s + 0.021


@pytest.mark.processes
@pytest.mark.usefixtures("warm_pythons")
@pytest.mark.parametrize(
    ("call", "unused"),
    [("device", ["resume=latest", "time_limit=60"]), ("resume()", ["time_limit=60"])],
)
def test_one_process_without_a_launcher_says_what_its_script_has_not_looked_at(
    call: str, unused: list[str]
) -> None:
    Training().train_to(1, every=1)
    text = f"""
from tests.runtime.resumed_training import Training
for _ in range(2):
    accelerator = Training().accelerator
accelerator.{call}
"""
    variables = {"HEADWAY_RUN": launched(resume="latest", time_limit=60)}
    done = run([sys.executable, script(text)], environment(**variables), timeout_s=120, code=0)
    said = [text for text in ("resume=latest", "time_limit=60") if f"{text} had no" in done.stderr]
    assert said == unused
    assert done.stderr.count("had no effect") == len(unused)
