"""What training does on one of several ranks; see runtime_worker.py."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.utils import set_seed
from tests.distributed.this_rank import FOLDER, RANK, WORLD


def weights() -> dict[str, list[float]]:
    """Weights after three optimizer steps on global batches of 12 samples."""
    result = {}
    for accumulation in (1, 2):
        set_seed(7)
        accelerator = Accelerator(gradient_accumulation_steps=accumulation)
        model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        inputs, targets = torch.randn(36, 5), torch.randn(36, 1)
        loader = DataLoader(
            TensorDataset(inputs, targets), batch_size=12 // WORLD // accumulation, shuffle=True
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        result[str(accumulation)] = torch.cat([p.flatten() for p in model.parameters()]).tolist()
    return result


def weights_after_an_uneven_batch() -> list[float]:
    """7 samples in one global batch of at most 12: all ranks must end alike."""
    set_seed(7)
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.randn(7, 2)), batch_size=12 // WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (x,) in loader:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
    return torch.cat([p.flatten() for p in model.parameters()]).tolist()


def schedule() -> dict[str, list[float]]:
    """Optimizer steps, scheduler steps and rate after an epoch of 10 batches in each rank."""
    result = {}
    for name, accumulation, split in (
        ("plain", 1, False),
        ("split", 1, True),
        ("3 of 10", 3, False),
    ):
        accelerator = Accelerator(split_batches=split, gradient_accumulation_steps=accumulation)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
        data = TensorDataset(torch.randn(10 * WORLD, 1))
        loader = DataLoader(data, batch_size=WORLD if split else 1)
        scheduler, loader, model, optimizer = accelerator.prepare(
            scheduler, loader, model, optimizer
        )
        due = []
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean() * 0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            due.append(accelerator.sync_gradients)
        result[name] = [
            sum(due),
            scheduler.last_epoch,
            round(scheduler.get_last_lr()[0], 6),
            due[-1],
        ]
    return result


def gradients_while_accumulating() -> list[bool]:
    """Whether the ranks' gradients agree after each of five micro-batches, two to a step."""
    set_seed(RANK)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(
        torch.nn.Linear(3, 1), DataLoader(TensorDataset(torch.randn(5 * WORLD, 3)), batch_size=1)
    )
    agree = []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x + RANK).square().mean())
        gradients = accelerator.gather(next(model.parameters()).grad)
        agree.append(bool((gradients == gradients[:1]).all()))
        if accelerator.sync_gradients:
            model.zero_grad()
    return agree


def names_of_weights() -> dict[str, list[str]]:
    accelerator = Accelerator()
    plain = torch.nn.Sequential(torch.nn.Linear(2, 1))
    prepared = accelerator.prepare(plain)
    before = accelerator.prepare(_compiled(torch.nn.Sequential(torch.nn.Linear(2, 1))))
    models = {"plain": prepared, "compiled after": _compiled(prepared), "compiled before": before}
    names = {name: list(accelerator.get_state_dict(model)) for name, model in models.items()}
    names |= {
        f"{name}, unwrapped": list(
            accelerator.unwrap_model(model, keep_torch_compile=False).state_dict()
        )
        for name, model in models.items()
    }
    assert accelerator.unwrap_model(prepared) is plain
    unwrapped = accelerator.unwrap_model(models["compiled after"])
    assert unwrapped(torch.ones(1, 2)).equal(plain(torch.ones(1, 2)))
    return names


def gradients_of_two_models() -> dict[str, Any]:
    """Whether the ranks' gradients of models a and b agree after a first of two micro-batches."""
    set_seed(3)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    models = [torch.nn.Linear(2, 1) for _ in range(3)]
    a, b, c = accelerator.prepare(*models)
    compiled = _compiled(c)
    with accelerator.accumulate(a, compiled):
        for model in (a, b, compiled):
            accelerator.backward(model(torch.ones(1, 2) * (RANK + 1)).sum())
    gathered = [accelerator.gather(model.weight.grad) for model in models]
    return dict(zip("abc", (bool((one == one[:1]).all()) for one in gathered), strict=True))


def weights_of_two_models() -> dict[str, list[float]]:
    """Generator and critic, each with its optimizer, after three steps on the same global batch."""
    result = {}
    for precision in ("no", "bf16"):
        set_seed(4)
        accelerator = Accelerator(mixed_precision=precision)
        g, d = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
        loader = DataLoader(TensorDataset(torch.randn(36, 3)), batch_size=12 // WORLD)
        g_steps, d_steps = (torch.optim.SGD(one.parameters(), lr=0.5) for one in (g, d))
        g, d, g_steps, d_steps, loader = accelerator.prepare(g, d, g_steps, d_steps, loader)
        for (x,) in loader:
            fake = g(x)
            assert fake.dtype == torch.float32
            if precision == "bf16":
                assert fake.equal(fake.bfloat16().float())
            accelerator.backward(d(fake.detach()).square().mean())
            d_steps.step()
            d_steps.zero_grad()
            accelerator.backward((d(g(x)) - 1).square().mean())
            g_steps.step()
            g_steps.zero_grad()
            d_steps.zero_grad()
        weights = [p.flatten() for one in (g, d) for p in one.parameters()]
        result[precision] = torch.cat(weights).tolist()
    return result


def buffers_after_loading() -> dict[str, list[list[float]]]:
    """What a training that saved goes on with, and one that has loaded: buffers and outputs."""

    def went_on(model: Any) -> list[list[float]]:
        own = getattr(model, "module", model)
        before = own.running_mean.tolist()  # read by this rank alone
        mine = torch.full((4, 3), 10.0 + RANK)
        return [before, [model(mine).sum().item()], own.running_mean.tolist()]

    def prepared() -> tuple[Accelerator, Any]:
        accelerator = Accelerator(cpu=True)
        model: Any = accelerator.prepare(torch.nn.BatchNorm1d(3))
        return accelerator, model

    found = {}
    for name, with_gradients in (
        ("after training", True),
        ("after a pass without gradients", False),
    ):
        accelerator, model = prepared()
        with torch.set_grad_enabled(with_gradients):
            model(torch.full((4, 3), 1.0 + RANK))
        accelerator.save_state(FOLDER / f"buffers_{WORLD}")
        found[f"{name}, saved"] = went_on(model)
        accelerator, model = prepared()
        accelerator.load_state(FOLDER / f"buffers_{WORLD}")
        found[f"{name}, loaded"] = went_on(model)
    return found


def _compiled(model: torch.nn.Module) -> torch.nn.Module:
    compiled: torch.nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
    return compiled
