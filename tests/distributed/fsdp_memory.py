"""The bytes that a rank holds while a model is sharded, and afterwards; measured by storages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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


def measured() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    found: dict[str, Any] = {}
    for kind in ("whole", "empty"):
        torch.manual_seed(0)
        if kind == "empty":
            with accelerator.empty_init():
                model: Any = GPT(WIDTH, LAYERS)
            found["made empty"] = all(one.is_meta for one in model.parameters())
        else:
            model = GPT(WIDTH, LAYERS)
            found["model"] = sum(one.nbytes for one in model.parameters())
            found["unit"] = sum(one.nbytes for one in model.blocks[0].parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with LiveBytes([*model.parameters(), *model.buffers()]) as live:
            model, optimizer = accelerator.prepare(model, optimizer)
        found[f"peak, made {kind}"] = live.peak
        found[f"after, made {kind}"] = live.now()
        accelerator.backward(model(torch.zeros(2, 8, dtype=torch.long)))
        optimizer.step()
        found["parameters"] = _local(model.parameters())
        found["gradients"] = _local(one.grad for one in model.parameters())
        found["optimizer"] = _local(
            value
            for state in optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        )
        accelerator.free_memory()
    return found


def _local(tensors: Iterable[Any]) -> int:
    return sum(one.to_local().nbytes for one in tensors)
