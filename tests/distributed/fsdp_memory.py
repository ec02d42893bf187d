"""The bytes that a rank holds while a model is sharded, and afterwards; measured by storages."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway import Accelerator
from tests.distributed.fsdp_models import GPT

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
    assert all(one.is_meta == is_empty for one in model.parameters())
    whole, unit = (
        sum(one.nbytes for one in each.parameters()) for each in (model, model.blocks[0])
    )
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
        gradients=_local(one.grad for one in model.parameters()),
        optimizer=_local(value for name, value in states if name != "step"),
    )


def _local(tensors: Iterable[Any]) -> int:
    return sum(one.to_local().nbytes for one in tensors)
