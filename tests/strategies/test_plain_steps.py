"""Which steps of a script without an Accelerator count, and what it must not notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from headway.ipc.progress import Progress
from headway.strategies.plain_steps import PlainSteps


@pytest.fixture
def seen() -> Iterator[Progress]:
    """See the steps of the test, as those of a rank are seen."""
    progress = Progress()
    hook = register_optimizer_step_post_hook(PlainSteps(progress).end)
    yield progress
    hook.remove()


def sgd(weight: torch.nn.Parameter | None = None) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1)) if weight is None else weight])


def test_each_step_of_one_optimizer_counts(seen: Progress) -> None:
    optimizer = sgd()
    for _ in range(5):
        optimizer.step()
    assert seen.step == 5


def test_two_optimizers_that_take_turns_make_one_step_and_of_five_to_one_the_five_count(
    seen: Progress,
) -> None:
    critic, generator = sgd(), sgd()
    for _ in range(5):
        critic.step()
        generator.step()
    assert seen.step == 5
    for _ in range(5):
        for _ in range(5):
            critic.step()
        generator.step()
    assert seen.step == 30


def test_an_optimizer_after_another_one_is_counted_on(seen: Progress) -> None:
    for optimizer in (sgd(), sgd()):
        for _ in range(10):
            optimizer.step()
    assert seen.step == 19  # the other one might have stepped again


@pytest.mark.parametrize("who", ["accelerator", "stopping"])
def test_steps_that_an_accelerator_or_a_trainer_counts_do_not_count_twice(
    who: str, seen: Progress
) -> None:
    seen.note_use(**{who: True})
    sgd().step()
    assert seen.step == 0


@pytest.mark.skipif(torch.__version__ < "2.9", reason="the compiler of torch 2.8 leaves a thread")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_a_compiled_step_is_compiled_as_ever_and_not_counted(seen: Progress) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = sgd(weight)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        weight.grad = torch.ones(1)
        step()
    assert weight.item() == pytest.approx(1 - 3e-3)
    assert seen.step == 0


@pytest.mark.parametrize("others", [[], [{"params": [torch.nn.Parameter(torch.ones(1))]}]])
def test_an_optimizer_of_which_groups_are_empty_counts_as_others(
    others: list[Any], seen: Progress
) -> None:
    torch.optim.SGD([{"params": []}, *others]).step()
    assert seen.step == 1
