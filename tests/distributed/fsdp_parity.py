"""Sharded training beside plain torch in the same process, and the bytes that a rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway import Accelerator
from tests.distributed.fsdp_models import GPT, MLP, VOCABULARY

CASES = [
    f"{model} {optimizer} {steps}"
    for model in ("gpt", "mlp")
    for optimizer in ("sgd", "adamw")
    for steps in (1, 3)  # micro-batches
]
BATCH, LENGTH, MAX_NORM = 12, 8, 0.5
MODELS: dict[str, Any] = {"gpt": GPT, "mlp": MLP}
State = dict[str, Tensor]


class Trained:
    """What a training came to."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []  # of each step, all in one
        self.norms: list[float] = []
        self.state: State = {}
        self.learning_rates: list[float] = []

    def difference(self, other: Trained) -> dict[str, float]:
        """Return by how much this differs from another at most; inf where states have no match."""
        pairs = zip(self.gradients, other.gradients, strict=True)
        names = self.state.keys() == other.state.keys()
        return {
            "gradients": max(float((pair - two).abs().max()) for pair, two in pairs),
            "norms": max(abs(a - b) for a, b in zip(self.norms, other.norms, strict=True)),
            "weights": max(
                float((t - other.state[name]).abs().max()) for name, t in self.state.items()
            )
            if names
            else float("inf"),
            "learning rates": float(self.learning_rates != other.learning_rates),
        }


def differences(cases: Iterable[str], steps: int) -> dict[str, dict[str, float]]:
    """Return by how much so many sharded steps differ, for cases such as "gpt sgd 3"."""
    found = {}
    for case in cases:
        name, kind, accumulation = case.split()
        how = (name, kind, int(accumulation), steps)
        mine, alone = sharded(*how), plain(*how)
        mine.state = mine.state or alone.state  # rank 0 alone has the state in full
        found[case] = mine.difference(alone)
    return found


def parts_of(name: str, kind: str) -> tuple[Any, Any, Any]:
    model = MODELS[name]()
    if kind == "sgd":
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:  # with the usual eps of 1e-8, gradients near zero make full steps in either direction
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)


def batches(count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        yield torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)


def sharded(name: str, kind: str, accumulation: int, steps: int) -> Trained:
    accelerator = Accelerator(cpu=True, strategy="fsdp", gradient_accumulation_steps=accumulation)
    rank, world = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(rank)  # the weights of rank 0 are those of all
    model, optimizer, scheduler = accelerator.prepare(*parts_of(name, kind))
    found = Trained()
    for batch in batches(steps * accumulation):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch[rank * BATCH // world : (rank + 1) * BATCH // world]))
            if accelerator.sync_gradients:
                found.gradients.append(_gradient(model))
                found.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    found.state = accelerator.get_state_dict(model)
    found.learning_rates = scheduler.get_last_lr()
    return found


def plain(name: str, kind: str, accumulation: int, steps: int) -> Trained:
    torch.manual_seed(0)
    model, optimizer, scheduler = parts_of(name, kind)
    found = Trained()
    for number, batch in enumerate(batches(steps * accumulation), 1):
        (model(batch) / accumulation).backward()
        if number % accumulation == 0:
            found.gradients.append(_gradient(model))
            found.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    found.state = {name: t.clone() for name, t in model.state_dict().items()}
    found.learning_rates = scheduler.get_last_lr()
    return found


def _gradient(model: torch.nn.Module) -> Tensor:
    """Return all gradients of a step, in full."""
    gradients: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat(
        [(g.full_tensor() if hasattr(g, "full_tensor") else g).flatten() for g in gradients]
    )


WIDTH, LAYERS = 96, 6


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the most bytes that the storages of tensors have had at a time."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, StorageWeakRef] = {}
        self._add(tensors)
        self.peak = self.now()

    def now(self) -> int:
        found = 0
        for key, reference in list(self._live.items()):
            if reference.expired():  # type: ignore[no-untyped-call]
                del self._live[key]
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            found += 0 if storage is None else storage.nbytes()
        return found

    def _add(self, values: Iterable[Any]) -> None:
        for value in values:
            value = value.to_local() if hasattr(value, "to_local") else value
            if isinstance(value, torch.Tensor) and not value.is_meta:
                storage = value.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self._add(tree_leaves(result))
        self.peak = max(self.peak, self.now())
        return result


class Measured(NamedTuple):
    """Bytes of a whole model and a unit; and what a rank held at most, afterwards, and holds."""

    model: int
    unit: int
    peak: int
    after: int
    parameters: int
    gradients: int
    optimizer: int


def measured(is_empty: bool) -> Measured:
    """Measure a step of a model that was made, or made without memory."""
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    torch.manual_seed(0)
    with accelerator.empty_init() if is_empty else nullcontext():
        model: Any = GPT(WIDTH, LAYERS)
    assert all(p.is_meta == is_empty for p in model.parameters())
    whole, unit = (sum(p.nbytes for p in each.parameters()) for each in (model, model.blocks[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        model, optimizer = accelerator.prepare(model, optimizer)
    after = live.now()
    accelerator.backward(model(torch.zeros(2, 8, dtype=torch.long)))
    optimizer.step()
    states = [state for of_one in optimizer.state.values() for state in of_one.items()]
    return Measured(
        model=whole,
        unit=unit,
        peak=live.peak,
        after=after,
        parameters=_local(model.parameters()),
        gradients=_local(p.grad for p in model.parameters()),
        optimizer=_local(value for name, value in states if name != "step"),
    )


def _local(tensors: Iterable[Any]) -> int:
    return sum(tensor.to_local().nbytes for tensor in tensors)
