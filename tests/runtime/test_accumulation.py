"""Accumulated gradients are those of a divided loss, to the bit."""

from __future__ import annotations

import pytest
import torch

from headway import Accelerator
from headway.contract.records import progress
from headway.precision.precision import Fp16


@pytest.mark.parametrize("steps", [2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("fp16", [False, True])
def test_gradients_are_those_of_the_divided_loss_to_the_bit(
    steps: int, dtype: torch.dtype, fp16: bool
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    if fp16:
        # the constructor refuses fp16 on CPUs
        accelerator.parts.training.precision = Fp16(torch.device("cpu"))
    weight = torch.randn(50, dtype=dtype, requires_grad=True)
    inputs = torch.randn(50, dtype=dtype)
    expected = torch.zeros(50, dtype=dtype)
    for _ in range(steps):
        loss = (weight * inputs).tanh().square().mean()
        divided = accelerator.scaler.scale(loss / steps) if accelerator.scaler else loss / steps
        expected += torch.autograd.grad(divided, weight, retain_graph=True)[0]
        accelerator.backward(loss)
    assert weight.grad is not None
    assert weight.grad.equal(expected)


def test_the_weight_of_a_micro_batch_follows_the_number_of_steps_and_the_shape_of_the_loss() -> (
    None
):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    gradients = []
    for steps, shape in ((2, (1,)), (4, (1,)), (4, ()), (1, (1,))):
        accelerator.gradient_accumulation_steps = steps
        weight = torch.zeros(1, requires_grad=True)
        accelerator.backward((weight * 4).reshape(shape))
        assert weight.grad is not None
        gradients.append(weight.grad.item())
    assert gradients == [2.0, 1.0, 1.0, 4.0]


def test_a_gradient_that_the_script_gives_is_weighted_too_and_one_that_lacks_is_asked_for() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    weight = torch.zeros(3, requires_grad=True)
    accelerator.backward(weight * 1.0, gradient=torch.tensor([4.0, 8.0, 0.0]))
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 2.0, 0.0]
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        accelerator.backward(weight * 1.0)
    assert progress().phase == "script"  # also after a failure


class _ReversesGradients(torch.autograd.Function):
    """Writes into the gradient that it is given, as many such layers do."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.neg_()


def test_a_backward_that_writes_into_its_gradient_changes_no_later_micro_batch() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    gradients = []
    for _ in range(3):
        weight = torch.ones(3, requires_grad=True)
        accelerator.backward(_ReversesGradients.apply(weight.sum()))  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        gradients.append(weight.grad[0].item())
    assert gradients == [-0.5, -0.5, -0.5]
