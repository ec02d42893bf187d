"""What sharded training does and refuses, on several ranks; see test_fsdp.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from headway import Accelerator
from headway.errors import HeadwayError
from tests.distributed.fsdp_models import GPT, MLP, VOCABULARY

TOKENS = torch.arange(48).reshape(6, 8) % VOCABULARY


def fsdp(**settings: Any) -> Accelerator:
    return Accelerator(cpu=True, **{"strategy": "fsdp", **settings})


def prepared(accelerator: Accelerator, seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    found: tuple[Any, Any] = accelerator.prepare(model, optimizer)
    return found


def own_rows(accelerator: Accelerator) -> Tensor:
    each = len(TOKENS) // accelerator.num_processes
    return TOKENS[accelerator.process_index * each :][:each]


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: int = 2) -> None:
    for _ in range(steps):
        accelerator.backward(model(own_rows(accelerator)))
        optimizer.step()
        optimizer.zero_grad()


def weights(accelerator: Accelerator, model: Any) -> Tensor:
    """Return all weights in full, on every rank."""
    with accelerator.whole(model) as inner:
        return torch.cat([one.detach().flatten().clone() for one in inner.parameters()])


def refused(function: Callable[[], Any]) -> str:
    try:
        function()
    except HeadwayError as error:
        problem = error.problems[0]
        return problem.what if problem.where and problem.fix else "without where or fix"
    return ""


def refusals() -> dict[str, str]:
    accelerator = fsdp()
    before = list((plain := GPT()).parameters())
    model = accelerator.prepare(plain)
    alone = nn.Linear(2, 2)
    scalar = MLP()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    with accelerator.empty_init():
        empty = MLP()
        empty.offset = nn.Parameter(torch.zeros(3))

    def with_optimizer(kind: Any) -> None:
        other = MLP()
        fsdp().prepare(other, kind(other.parameters()))

    def of_no_model() -> None:
        accelerator.prepare(torch.optim.SGD(alone.parameters(), lr=1.0))

    def mixed() -> None:
        accelerator.clip_grad_norm_([*model.parameters(), *alone.parameters()], 1.0)

    def joined() -> None:
        with accelerator.join_uneven_inputs([model]):
            pass

    def tokens_withheld() -> None:
        with accelerator.no_sync(model):
            accelerator.backward(model(own_rows(accelerator)), num_tokens=8)

    cases: dict[str, Callable[[], Any]] = {
        "num_tokens under no_sync": tokens_withheld,
        "deepcopy": lambda: copy.deepcopy(model),
        "deepcopy of a unit": lambda: copy.deepcopy(model.blocks[0]),
        "AveragedModel": lambda: torch.optim.swa_utils.AveragedModel(model),
        "Adafactor": lambda: with_optimizer(torch.optim.Adafactor),
        "Rprop": lambda: with_optimizer(torch.optim.Rprop),
        "scalar parameter": lambda: accelerator.prepare(scalar),
        "one layer more on a rank": lambda: accelerator.prepare(
            nn.Sequential(*[nn.Linear(2, 2) for _ in range(2 + accelerator.process_index)])
        ),
        "frozen on a rank": lambda: accelerator.prepare(
            nn.Linear(2, 2).requires_grad_(accelerator.is_main_process)
        ),
        "empty parameter": lambda: accelerator.prepare(nn.Linear(0, 3)),
        "two dtypes": lambda: fsdp(wrap=10**6).prepare(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
        ),
        "optimizer of no prepared model": of_no_model,
        "sharded and other parameters": mixed,
        "parameters from before, norm": lambda: accelerator.clip_grad_norm_(before, 1.0),
        "parameters from before, value": lambda: accelerator.clip_grad_value_(before, 1.0),
        "class that is not there": lambda: fsdp(wrap="Blok").prepare(GPT()),
        "shard_size that does not divide": lambda: fsdp(strategy="hsdp", shard_size=5),
        "hsdp without shard_size": lambda: fsdp(strategy="hsdp"),
        "cpu_offload on a CPU": lambda: fsdp(cpu_offload=True),
        "auto_micro_batch": lambda: fsdp(auto_micro_batch=True),
        "join_uneven_inputs": joined,
        "ModuleList": lambda: accelerator.prepare(nn.ModuleList([nn.Linear(1, 1)])),
        "nothing initialises it": lambda: accelerator.prepare(empty),
    }
    return {name: refused(function) for name, function in cases.items()}


def evaluation() -> dict[str, bool]:
    accelerator = fsdp(forward_methods=["logits"])
    model, optimizer = prepared(accelerator)
    with torch.inference_mode():  # as the very first pass
        logits = model.logits(TOKENS)
        model(TOKENS)
    is_sharded = all(hasattr(one, "full_tensor") for one in model.parameters())
    train(accelerator, model, optimizer)
    with torch.no_grad():
        moved = not torch.equal(model.logits(TOKENS), logits)
    return {
        "resharded": is_sharded,
        "trains after inference_mode": moved,
        "unwrapped is itself": accelerator.unwrap_model(model) is model,
        "distributed_type": accelerator.distributed_type == "FSDP",
    }


class Autoencoder(nn.Module):
    """A model whose forward() calls a method that is also called by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 4), nn.Linear(4, 8)

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()  # type: ignore[no-any-return]

    def error(self, x: Tensor) -> Tensor:
        return self(x) - self.outer(self.encode(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.encode(x))  # type: ignore[no-any-return]


def methods() -> dict[str, bool]:
    accelerator = fsdp(forward_methods=["encode", "error"])
    torch.manual_seed(0)
    plain = Autoencoder()
    x = torch.randn(3, 8)
    encoded, decoded = plain.encode(x).detach(), plain(x).detach()
    model = accelerator.prepare(plain)
    accelerator.backward(model(x).sum())
    inner: Any
    with accelerator.whole(model) as inner:
        of_rank_0 = inner.state_dict() if accelerator.is_main_process else {}
        is_whole = inner.inner.weight.shape == (4, 8)
    found = {
        "in forward()": torch.allclose(model(x), decoded),
        "by itself": torch.allclose(model.encode(x), encoded),
        "after another": bool((model.error(x).abs() < 1e-6).all()),
        "is still whole after state_dict()": is_whole,
        "is sharded after whole()": all(hasattr(one, "full_tensor") for one in model.parameters()),
    }
    state = accelerator.get_state_dict(model)
    same = [torch.equal(one, state[name]) for name, one in of_rank_0.items()]
    model.zero_grad()
    accelerator.backward(model.encode(x).sum())
    torch.manual_seed(0)
    expected: Any = Autoencoder()
    expected.encode(x).sum().backward()
    gradient = model.inner.weight.grad.full_tensor()
    return {
        **found,
        "state_dict() in whole()": all(same) and len(same) == len(state),
        "gradients of a method": torch.allclose(gradient, expected.inner.weight.grad),
    }


def saving(folder: Path) -> dict[str, Any]:
    accelerator = fsdp()
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer)
    state = accelerator.get_state_dict(model)
    accelerator.save_model(model, folder / "files", max_shard_size=2000)
    accelerator.save_state(folder / "sharded")
    accelerator.wait_for_everyone()
    files = sorted((folder / "files").glob("*.safetensors"))
    read = {name: one for path in files for name, one in load_file(path).items()}
    train(accelerator, model, optimizer)
    expected = weights(accelerator, model)
    found: dict[str, Any] = {
        "is whole here": bool(state),
        "files": len(files),
        "largest": max(path.stat().st_size for path in files),
        "as saved": all(
            torch.equal(one, read[name]) for name, one in state.items() if name in read
        ),
        "tied once": ("head.weight" in read) != ("token.weight" in read),
    }
    for strategy in ("fsdp", "ddp"):
        other = fsdp(strategy=strategy)
        model, optimizer = prepared(other, seed=5)
        other.load_state(folder / "sharded")
        train(other, model, optimizer)
        found[f"goes on with {strategy}"] = float((weights(other, model) - expected).abs().max())
        other.save_state(folder / strategy)
    other = fsdp()
    model, optimizer = prepared(other, seed=6)
    other.load_state(folder / "ddp")
    found["ddp to fsdp"] = float((weights(other, model) - expected).abs().max())
    found["state is sharded"] = all(
        hasattr(one["exp_avg"], "full_tensor") for one in optimizer.state.values()
    )
    if (folder / "of one rank").is_dir():
        other.load_state(folder / "of one rank")
        found["weights of one rank"] = float(weights(other, model).double().sum())
    return found


def saved_between_steps(folder: Path) -> float:
    """Return by how much a training differs that went on from the middle of an accumulation."""

    def micro_batch(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(own_rows(accelerator)))
            optimizer.step()
            optimizer.zero_grad()

    one, other = (fsdp(gradient_accumulation_steps=2) for _ in range(2))
    model, optimizer = prepared(one)
    for _ in range(3):
        micro_batch(one, model, optimizer)
    one.save_state(folder / "between")
    micro_batch(one, model, optimizer)
    again, another = prepared(other, seed=8)
    other.load_state(folder / "between")
    micro_batch(other, again, another)
    return float((weights(other, again) - weights(one, model)).abs().max())


def ways_to_train() -> dict[str, Any]:
    """Return by how much ways that should come to the same differ from plain sharded training."""
    accelerator = fsdp()
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer)
    expected = weights(accelerator, model)
    found: dict[str, Any] = {}
    cases: dict[str, dict[str, Any]] = {
        "ddp": {"strategy": "ddp"},
        "hsdp": {"strategy": "hsdp", "shard_size": 2},
        "activation checkpointing": {"activation_checkpointing": True},
        "one unit": {"wrap": 10**6},
        "named units": {"wrap": ["Block", "Embedding"]},
    }
    for name, settings in cases.items():
        if name == "hsdp" and accelerator.num_processes % 2:
            continue
        other = fsdp(**settings)
        model, optimizer = prepared(other)
        train(other, model, optimizer)
        found[name] = float((weights(other, model) - expected).abs().max())
    other = fsdp()
    model, optimizer = prepared(other)
    for _ in range(2):
        with other.no_sync(model):
            other.backward(model(own_rows(other)) * 0.25)
        other.backward(model(own_rows(other)) * 0.75)
        optimizer.step()
        optimizer.zero_grad()
    found["no_sync"] = float((weights(other, model) - expected).abs().max())
    other = fsdp(gradient_accumulation_steps=2)
    model, optimizer = prepared(other)
    for part in (own_rows(other),) * 4:
        with other.accumulate(model):
            tokens = part[:, 1:].numel()
            other.backward(model(part) * tokens, num_tokens=tokens)
            optimizer.step()
            optimizer.zero_grad()
    found["num_tokens"] = float((weights(other, model) - expected).abs().max())
    return found


def averaged(strategy: str) -> float:
    """Return the sum of an average of weights, kept as the documentation says."""
    accelerator = fsdp(strategy=strategy)
    model, optimizer = prepared(accelerator)
    average = [one.detach().clone() for one in model.parameters()]
    for _ in range(2):
        train(accelerator, model, optimizer, 1)
        torch._foreach_lerp_(average, [one.detach() for one in model.parameters()], 0.25)
    with torch.no_grad():
        for one, mean in zip(model.parameters(), average, strict=True):
            one.copy_(mean)
    return float(weights(accelerator, model).double().sum())


class Kept:
    """Tensors that a checkpoint has; loaded in their place, or instead of them."""

    def __init__(self, tensors: list[Tensor], *, in_place: bool = True) -> None:
        self.tensors, self.in_place = tensors, in_place

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": self.tensors}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.in_place:
            self.tensors = state["tensors"]
        for one, saved in zip(self.tensors, state["tensors"], strict=True):
            one.copy_(saved)


def kept_averages(folder: Path) -> dict[str, bool]:
    """Return whether averages come back as tensors of the kind that parameters are, with values."""

    def averages(strategy: str, seed: int) -> tuple[Accelerator, list[Tensor], list[Kept]]:
        accelerator = fsdp(strategy=strategy)
        model, _ = prepared(accelerator, seed)
        parameters = [one.detach() for one in model.parameters()]
        kept = [Kept([one + 1 for one in parameters]), Kept([], in_place=False)]
        accelerator.register_for_checkpointing(*kept)
        return accelerator, parameters, kept

    found = {}
    for saved, loaded in (("fsdp", "fsdp"), ("fsdp", "ddp"), ("ddp", "fsdp")):
        one, parameters, kept = averages(saved, seed=0)
        kept[1].tensors = kept[0].tensors[:2]
        one.save_state(folder / f"averages {saved} {loaded}")
        whole = [one.parts.training.strategy.read_whole(each) for each in kept[0].tensors]
        other, parameters, again = averages(loaded, seed=1)
        other.load_state(folder / f"averages {saved} {loaded}")
        found[f"{saved} to {loaded}"] = all(
            torch.equal(other.parts.training.strategy.read_whole(each), value)
            for tensors in (again[0].tensors, again[1].tensors)
            for each, value in zip(tensors, whole, strict=False)
        )
        if saved == loaded:
            pairs: list[Any] = [*zip(again[1].tensors, parameters, strict=False)]
            found["as parameters are"] = all(
                (type(each), each.placements) == (type(live), live.placements)
                for each, live in pairs
            )
    return found


def two_models() -> dict[str, Any]:
    accelerator = fsdp()
    torch.manual_seed(0)
    one, two = MLP(), MLP()
    optimizers: Any = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, two)]
    models: Any = (one, two)
    *models, first, second = accelerator.prepare(one, two, *optimizers)
    frozen = models[0].layers[2].weight
    strategy = accelerator.parts.training.strategy
    before = strategy.read_whole(frozen).clone()
    batch = own_rows(accelerator)
    for step in range(2):
        models[0].layers[2].requires_grad_(step == 1)
        for model, optimizer in zip(models, (first, second), strict=True):
            accelerator.backward(model(batch))
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            kept = torch.equal(strategy.read_whole(frozen), before)
    return {
        "frozen stays": kept,
        "unfrozen moves": not torch.equal(strategy.read_whole(frozen), before),
    }


def metrics() -> dict[str, Any]:
    found = {}
    is_even = torch.distributed.get_world_size() % 2 == 0
    for strategy in ("fsdp", "hsdp") if is_even else ("fsdp",):
        accelerator = fsdp(strategy=strategy, shard_size=2 if strategy == "hsdp" else None)
        data: Any = torch.arange(11)
        loader = accelerator.prepare(DataLoader(data, batch_size=2))
        gathered = [accelerator.gather_for_metrics(batch) for batch in loader]
        found[strategy] = torch.cat(gathered).tolist()
    return found


def buffers() -> list[float]:
    accelerator = fsdp()
    model = accelerator.prepare(nn.BatchNorm1d(3))
    model(torch.full((4, 3), float(accelerator.process_index)))
    model(torch.zeros(4, 3))
    model.eval()(torch.zeros(4, 3))
    return [float(one) for one in model.running_mean]


def checked(folder: Path) -> dict[str, Any]:
    return {
        "refusals": refusals(),
        "evaluation": evaluation(),
        "methods": methods(),
        "saving": saving(folder),
        "ways": {**ways_to_train(), "saved between steps": saved_between_steps(folder)},
        "averages": [averaged(strategy) for strategy in ("ddp", "fsdp")],
        "kept averages": kept_averages(folder),
        "two models": two_models(),
        "metrics": metrics(),
        "buffers": buffers(),
    }
