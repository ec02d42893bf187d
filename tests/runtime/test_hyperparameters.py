"""A resume reports the hyperparameters of the script that the checkpoint replaces."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, SequentialLR, StepLR

from headway import Accelerator
from headway.checkpoint.preemption import _log_if_untrained
from headway.training.optimizer import (
    optimizer_options,
    override_notes,
    scheduler_options,
    scheduler_paths,
)

WEIGHTS = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]


def groups(*rates: float) -> list[dict[str, Any]]:
    return [{"params": [weight], "lr": rate} for weight, rate in zip(WEIGHTS, rates, strict=False)]


def warmed(optimizer: Optimizer, size: int = 5) -> SequentialLR:
    warm_up = LambdaLR(optimizer, lambda step: step / size)
    return SequentialLR(optimizer, [warm_up, StepLR(optimizer, size)], [size])


SGDS: list[tuple[Any, Any, Any, list[str]]] = [  # given, given before, loaded
    (0.1, 0.1, 0.1, []),
    (0.5, 0.1, 0.1, ["learning rate 0.1 from the checkpoint overrides 0.5 from the script"]),
    (0.5, 0.5, 0.1, []),  # the script has lowered it
    (0.5, 0.1, 0.5, []),  # it was set after an earlier resume
    (torch.tensor(0.5), 0.5, 0.5, []),
]


@pytest.mark.parametrize(("given", "before", "loaded", "expected"), SGDS)
def test_a_difference_of_optimizers_is_one_line(
    given: Any, before: Any, loaded: Any, expected: list[str]
) -> None:
    all_groups = [optimizer_options(SGD(groups(rate, rate))) for rate in (given, before, loaded)]
    lines = [*override_notes(all_groups[0], all_groups[1], all_groups[2], [""] * 3)]
    assert [line.split(";")[0].removeprefix("note: ") for line in lines] == expected


def test_schedules_are_compared_and_not_where_they_stand() -> None:
    one, other, same = (SGD(groups(0.1)) for _ in range(3))
    saved = scheduler_options(warmed(one))
    assert [*override_notes(scheduler_options(warmed(same)), saved, saved, [""] * 3)] == []
    setters = [f"{path}.{{name}} = {{value}}" for path in scheduler_paths(warmed(one), "scheduler")]
    (line,) = override_notes(scheduler_options(warmed(other, 7)), saved, saved, setters)
    assert "step_size 5 from the checkpoint overrides 7 from the script" in line
    assert line.endswith("afterwards: scheduler._schedulers[1].step_size = 7")
    assert optimizer_options(one)[0]["lr"] == 0.1  # also where a warm-up has lowered it


@pytest.mark.parametrize("how", ["prepare", "register_for_checkpointing", "print"])
def test_a_schedule_that_is_in_no_checkpoint_is_reported(
    how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator, optimizer = Accelerator(cpu=True), SGD(groups(0.1))
    accelerator.prepare(optimizer)
    getattr(accelerator, how)(StepLR(optimizer, 1))
    accelerator.save_state("saved")
    assert ("not passed to prepare()" in capsys.readouterr().err) == (how == "print")


class Script:
    """What the same command runs again, perhaps with other arguments."""

    def __init__(self, lr: float = 0.05, size: int = 2, steps: int = 2) -> None:
        self.accelerator = Accelerator(cpu=True, project_dir="run")
        model = torch.nn.Linear(1, 1)
        optimizer = SGD(model.parameters(), lr=lr, momentum=0.9)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, optimizer, StepLR(optimizer, size)
        )
        run = self.accelerator.resume()
        for _ in range(run.step, steps):
            self.accelerator.backward(self.model(torch.ones(1, 1)).sum())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.accelerator.checkpoint()


def test_a_resume_reports_what_it_replaces_and_how_to_set_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Script().accelerator.end_training()
    Script(steps=3).accelerator.end_training()
    assert "replaces" not in capsys.readouterr().err
    for steps in (4, 5):  # as long as it is not set
        script = Script(0.0001, 7, steps)
        lines = [line for line in capsys.readouterr().err.splitlines() if "overrides" in line]
        assert len(lines) == 2
        assert "learning rate 0.05 from the checkpoint overrides 0.0001 from the script" in lines[0]
        assert "step_size 2 from the checkpoint overrides 7 from the script" in lines[1]
        script.accelerator.end_training()
    for line in lines:
        exec(line.split("afterwards: ")[1], vars(script).copy())  # noqa: S102
    assert script.optimizer.param_groups[0]["lr"] == 0.0001
    assert script.scheduler.scheduler.step_size == 7


def test_a_resume_without_a_step_says_that_nothing_was_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Script(steps=2).accelerator.end_training()
    Script(steps=3).accelerator.end_training()
    said = "nothing was left to train"
    assert said not in capsys.readouterr().err
    script = Script(steps=1)
    progress = script.accelerator.parts.training.progress
    report = partial(_log_if_untrained, progress, progress.num_trained, "run")
    with monkeypatch.context() as failed:
        failed.setattr(sys, "last_type", ValueError, raising=False)
        report()
    try:
        raise ValueError
    except ValueError:
        report()
    assert said not in capsys.readouterr().err
    script.accelerator.end_training()
    assert capsys.readouterr().err.count(said) == 1
