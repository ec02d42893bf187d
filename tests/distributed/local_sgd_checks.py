"""Weights that ranks average every few steps; see runtime_worker.py."""

from __future__ import annotations

from typing import Any

import torch

from headway import Accelerator
from headway.errors import UsageError
from headway.local_sgd import LocalSGD
from headway.utils import gather
from tests.distributed.this_rank import FOLDER, RANK


def local_sgd() -> dict[str, Any]:
    """Whether all ranks have the same weight after each of four steps, and the last one."""
    result: dict[str, Any] = {}
    for enabled in (True, False):
        torch.manual_seed(0)
        accelerator = Accelerator()
        plain = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(plain.weight)
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=1.0))
        agree = []
        with LocalSGD(accelerator, model, 3, enabled=enabled) as averaging:
            for _ in range(4):
                with accelerator.accumulate(model):
                    accelerator.backward(-(RANK + 1) * model(torch.ones(1, 1)).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                averaging.step()
                agree.append(len(gather(plain.weight.detach()).unique()) == 1)
        result[str(enabled)] = [agree, plain.weight.item()]
    return result


def local_sgd_checkpoints() -> list[bool]:
    """Whether a checkpoint can be saved after each of four steps, and after the context."""
    accelerator = Accelerator()
    plain = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=1.0))
    with LocalSGD(accelerator, model, 3) as averaging:
        can_be_saved = []
        for _ in range(4):
            accelerator.backward(-(RANK + 1) * model(torch.ones(1, 1)).sum())
            optimizer.step()
            averaging.step()
            can_be_saved.append(_can_be_saved(accelerator))
    return [*can_be_saved, _can_be_saved(accelerator)]


def local_sgd_goes_on() -> bool:
    """Whether this rank's own steps are the same after a checkpoint as before it was loaded."""
    accelerator = Accelerator()
    plain = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(
        plain, torch.optim.SGD(plain.parameters(), lr=1.0, momentum=0.9)
    )

    def weight_after(steps: int) -> float:
        with LocalSGD(accelerator, model, 2) as averaging:
            for _ in range(steps):
                accelerator.backward(-(RANK + 1) * model(torch.ones(1, 1)).sum())
                optimizer.step()
                optimizer.zero_grad()
                averaging.step()
            return plain.weight.item()

    weight_after(2)
    folder = accelerator.save_state(FOLDER / "local_sgd_goes_on")
    expected = weight_after(1)
    accelerator.load_state(folder)
    return weight_after(1) == expected


def _can_be_saved(accelerator: Accelerator) -> bool:
    try:
        accelerator.save_state(FOLDER / "local_sgd")
    except UsageError:
        return False
    return True


def local_sgd_gradients_of_tokens() -> list[float]:
    """The gradient of each of three steps, of the mean over this rank's own tokens."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    plain = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=1.0))
    gradients = []
    with LocalSGD(accelerator, model, 3) as averaging:
        for _ in range(3):
            for tokens in (1, 2 + RANK):
                with accelerator.accumulate(model):
                    loss = (RANK + 1) * model(torch.ones(tokens, 1)).sum()
                    accelerator.backward(loss, num_tokens=tokens)
            assert plain.weight.grad is not None
            gradients.append(plain.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
            averaging.step()
    return gradients
