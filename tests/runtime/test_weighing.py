"""What each loss of a step weighs, in one process; with several ranks in tests/distributed."""

from __future__ import annotations

import pytest
import torch

from headway import Accelerator
from headway.errors import UsageError
from headway.ipc.progress import process_progress
from headway.precision.precision import Fp16


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulated_gradients_are_those_of_the_mean(fp16: bool, dtype: torch.dtype) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False, dtype=dtype))
    if fp16:
        # the constructor refuses fp16 on CPUs
        accelerator.parts.training.precision = Fp16().set_up(torch.device("cpu"))
    for tokens in ([1.0], [], [2.0, 3.0, 6.0]):
        with accelerator.accumulate(model):
            loss = model(torch.tensor(tokens, dtype=dtype).reshape(-1, 1)).sum()
            accelerator.backward(loss, num_tokens=torch.tensor([len(tokens)]))
    gradient = model.weight.grad.item() / accelerator.parts.training.precision.loss_scale()
    assert gradient == pytest.approx(12 / 4, rel=1e-2 if dtype is torch.bfloat16 else 1e-6)


def test_no_token_at_all_gives_gradients_of_zero() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.backward(model(torch.zeros(0, 1)).sum(), num_tokens=0)
    assert model.weight.grad.item() == 0


def test_freed_memory_begins_a_new_step() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    for tokens in (100, 1):
        accelerator.free_memory()
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(tokens, 1)).sum(), num_tokens=tokens)
    assert model.weight.grad.item() == 1


@pytest.mark.parametrize("counts", [(2, 2), (2, None), (None, 2)])
def test_losses_of_one_micro_batch_that_cannot_be_weighed_together_are_refused(
    counts: tuple[int | None, ...],
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 1)).sum(), num_tokens=counts[0])
        with pytest.raises(UsageError):
            accelerator.backward(model(torch.ones(2, 1)).sum(), num_tokens=counts[1])


def test_without_accumulation_each_loss_of_a_step_has_its_own_mean() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with accelerator.accumulate(model):
        for count in (4, 2):
            accelerator.backward(model(torch.ones(count, 1)).sum(), num_tokens=count)
        accelerator.backward(model(torch.ones(3, 1)).mean())
    assert model.weight.grad.item() == 3


def test_a_step_whose_last_micro_batch_has_no_tokens_is_refused() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=1.0))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 1)).sum(), num_tokens=2)
    with accelerator.accumulate(model), pytest.raises(UsageError):
        optimizer.step()


def test_tokens_are_refused_where_nothing_tells_the_last_backward_pass() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with accelerator.no_sync(model), pytest.raises(UsageError):
        accelerator.backward(model(torch.ones(2, 1)).sum(), num_tokens=2)
    accelerator.backward(model(torch.ones(2, 1)).sum(), num_tokens=2)
    assert model.weight.grad.item() == 1


@pytest.mark.parametrize("steps", [2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("fp16", [False, True])
def test_gradients_are_those_of_the_divided_loss_to_the_bit(
    steps: int, dtype: torch.dtype, fp16: bool
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    if fp16:
        # the constructor refuses fp16 on CPUs
        accelerator.parts.training.precision = Fp16().set_up(torch.device("cpu"))
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
    with pytest.raises(UsageError):
        accelerator.gradient_accumulation_steps = 0


def test_a_gradient_that_the_script_gives_is_weighted_too_and_one_that_lacks_is_asked_for() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    weight = torch.zeros(3, requires_grad=True)
    accelerator.backward(weight * 1.0, gradient=torch.tensor([4.0, 8.0, 0.0]))
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 2.0, 0.0]
    with pytest.raises(UsageError, match=r"single element, but has shape \[3\]"):
        accelerator.backward(weight * 1.0)
    with pytest.raises(UsageError, match=r"gather\(\), which has no gradients"):
        accelerator.backward((weight * 1.0).detach().sum())
    assert process_progress().phase == "script"  # also after a failure


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
