"""fp16's loss scale; runs on the CPU, whose kernels obey the same GradScaler."""

from __future__ import annotations

import pytest
import torch

from headway import Accelerator
from headway.errors import UsageError
from headway.precision.precision import Fp16
from headway.training.accumulation import Accumulation
from headway.training.optimizer import PreparedOptimizer, PreparedScheduler

CPU = torch.device("cpu")
fused_or_not = pytest.mark.parametrize("fused", [False, True])


class Training:
    """Two weights with an optimizer each, under one loss scale."""

    def __init__(self, fused: bool = False) -> None:
        self.precision = Fp16().set_up(CPU)
        self.weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        self.optimizers = [
            PreparedOptimizer(
                torch.optim.SGD([weight], lr=1.0, fused=fused),
                accumulation=Accumulation(1),
                precision=self.precision,
            )
            for weight in self.weights
        ]

    def backward(self, gradient: float, *, of: tuple[int, ...] = (0, 1)) -> None:
        self.precision.backward(sum(self.weights[name] * gradient for name in of))  # type: ignore[arg-type]


@fused_or_not
def test_overflow_skips_the_step_and_the_scheduler(fused: bool) -> None:
    training = Training(fused)
    optimizer = training.optimizers[0]
    plain = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
    scheduler = PreparedScheduler(plain, optimizer, step_with_optimizer=True)
    skipped = []
    for gradient in (1.0, float("inf"), 1.0):
        training.backward(gradient)
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
        scheduler.step()
        optimizer.zero_grad()
        training.optimizers[1].zero_grad()
    assert skipped == [False, True, False]
    assert scheduler.last_epoch == 2
    assert training.weights[0].item() == pytest.approx(-1.1)  # -1 at lr 1, then -1 at lr 0.1


@fused_or_not
def test_two_optimizers_step_on_one_backward_pass_with_one_scale(fused: bool) -> None:
    training = Training(fused)
    training.backward(float("inf"), of=(0,))
    training.backward(1.0, of=(1,))
    for optimizer in training.optimizers:
        optimizer.step()
    assert [optimizer.step_was_skipped for optimizer in training.optimizers] == [True, False]
    assert [weight.item() for weight in training.weights] == [0.0, -1.0]


def test_clipping_twice_unscales_once_and_only_what_is_clipped() -> None:
    training = Training()
    inner = [optimizer.optimizer for optimizer in training.optimizers]
    training.backward(3.0)
    for _ in range(2):
        training.precision.unscale(inner, training.weights[:1])
    assert training.weights[0].grad == 3.0
    assert training.weights[1].grad is not None
    assert training.weights[1].grad.item() > 1000
    for optimizer in training.optimizers:
        optimizer.step()
    assert [weight.item() for weight in training.weights] == [-3.0, -3.0]


def test_gradients_that_are_dropped_after_clipping_do_no_harm() -> None:
    training = Training()
    optimizer = training.optimizers[0]
    for step in (False, True):
        training.backward(3.0, of=(0,))
        training.precision.unscale([optimizer.optimizer], training.weights[:1])
        assert training.weights[0].grad == 3.0
        if step:
            optimizer.step()
        optimizer.zero_grad()
    assert training.weights[0].item() == -3.0


def test_scale_halves_after_an_overflow() -> None:
    training = Training()
    sizes = []
    for gradient in (1.0, float("inf"), 1.0):
        training.backward(gradient, of=(0,))
        assert training.weights[0].grad is not None
        sizes.append(training.weights[0].grad.item())
        training.optimizers[0].step()
        training.optimizers[0].zero_grad()
    assert sizes[2] == sizes[0] / 2


def test_closures_are_refused() -> None:
    training = Training()
    training.backward(1.0)
    with pytest.raises(UsageError, match="closure"):
        training.optimizers[0].step(lambda: 0.0)


def test_norm_of_accumulating_gradients_is_their_true_one() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.parts.training.precision = Fp16().set_up(CPU)  # refused by name on CPUs
    weight = torch.nn.Parameter(torch.zeros(1))
    with accelerator.accumulate():
        accelerator.backward(weight * 4.0)
        assert weight.grad is not None
        assert weight.grad.item() > 1000
        assert accelerator.clip_grad_norm_([weight], 1.0).item() == 2.0


def test_a_state_that_is_loaded_between_clipping_and_a_step_is_trained_on() -> None:
    training = Training()
    state = training.precision.state_dict()
    scaler = training.precision.scaler
    for _ in range(2):
        training.backward(1.0)
        training.precision.unscale(training.optimizers, training.weights)
        training.precision.load_state_dict(state)
    assert training.precision.scaler is scaler
