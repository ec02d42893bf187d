"""Counts device memory by storage and category, and records the peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from headway.estimate.child.patching import line_now, replace
from headway.estimate.planner import CATEGORIES

_ACTIVATIONS, _OTHER = "activations", "other"

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(eq=False, slots=True)
class Storage:
    """Current size and category of a storage."""

    category: str
    nbytes: int = 0
    is_counted: bool = False
    gone: Any = None


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the storages of all tensors that operators return.

    The category of a storage is often known only later (`classify`). Changes are therefore stored,
    and the peak is broken down by category at the end. Only tensors on `device` are counted;
    `fake_mode` is None for real tensors.
    """

    def __init__(self, device: torch.device, fake_mode: Any = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake_mode = fake_mode
        self._device = device
        self._entries: Any = WeakIdKeyDictionary()
        self._changes: list[tuple[Storage, int]] = []  # in bytes
        self._current = 0
        self._peak_at = 0
        self.peak_bytes = 0
        self.peak_when = ""
        self.phase = "before the first forward pass"
        self.depth = 0  # depth of nested module calls
        self.in_step = False  # whether an optimizer step is running

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # torch then dispatches the local tensors
        if func is _WAIT and self._fake_mode is not None:
            return args[0]
        result = func(*args, **(kwargs or {}))
        if active_fake_mode() is self._fake_mode:  # DTensor has another mode for shapes
            for leaf in tree_iter(result):
                if isinstance(leaf, torch.Tensor):
                    self.observe(leaf)
        return result

    def observe(self, tensor: torch.Tensor) -> None:
        is_counted = tensor.device == self._device
        for storage in _storages(tensor):
            entry = self._entries.get(storage) or self._new_entry(storage)
            self._count(entry, storage.nbytes() if is_counted else 0)

    def classify(self, tensor: torch.Tensor, category: str) -> None:
        """Set the category of a tensor's storages unless it is already set."""
        self.observe(tensor)
        for storage in _storages(tensor):
            entry = self._entries[storage]
            if entry.category in (_ACTIVATIONS, _OTHER):
                entry.category = category

    def resized(self, storage: torch.UntypedStorage) -> None:
        entry = self._entries.get(storage)
        if entry is not None and entry.is_counted:
            self._count(entry, storage.nbytes())

    def reset_peak(self) -> None:
        """Discard the peak so far, because a real run of the trial's strategy does not reach it."""
        self.peak_bytes, self._peak_at = self._current, len(self._changes)

    def peak_by_category(self) -> dict[str, int]:
        found = dict.fromkeys(CATEGORIES, 0)
        for entry, change in self._changes[: self._peak_at]:
            found[entry.category] += change
        return found

    def _new_entry(self, storage: torch.UntypedStorage) -> Storage:
        is_in_backward = torch._C._current_graph_task_id() != -1
        category = _ACTIVATIONS if self.depth or is_in_backward else _OTHER
        entry = Storage("optimizer" if self.in_step else category)
        entry.gone = weakref.ref(storage, lambda _: self._count(entry, 0))
        self._entries[storage] = entry
        return entry

    def _count(self, entry: Storage, nbytes: int) -> None:
        change = nbytes - entry.nbytes
        entry.is_counted = entry.is_counted or nbytes > 0
        entry.nbytes = nbytes
        if not change:
            return
        self._changes.append((entry, change))
        self._current += change
        if self._current > self.peak_bytes:
            self.peak_bytes, self._peak_at = self._current, len(self._changes)
            line = line_now()
            self.peak_when = f"{self.phase}, at {line}" if line else self.phase


def _storages(tensor: torch.Tensor) -> Iterable[torch.UntypedStorage]:
    """Return the storages of a tensor or of its local tensors (DTensor).

    `get_untyped_storages` is private; torch's memory tracker uses it in the same way.
    """
    if type(tensor) in _PLAIN or hasattr(tensor, "fake_mode"):
        return (tensor.untyped_storage(),) if tensor.layout is torch.strided else ()
    return get_untyped_storages(tensor)


class Models:
    """Tracks a script's modules and optimizers and classifies their tensors in the ledger."""

    def __init__(
        self,
        ledger: Ledger,
        before_first_call: Callable[[torch.nn.Module], None],
        after_step: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._before_first_call = before_first_call
        self._after_step = after_step
        # by id: a script's class may define __hash__
        self._modules = weakref.WeakValueDictionary[int, torch.nn.Module]()
        self._called = weakref.WeakValueDictionary[int, torch.nn.Module]()
        self._optimizers = weakref.WeakValueDictionary[int, torch.optim.Optimizer]()
        self._steps: dict[int, int] = {}

    def register_hooks(self) -> None:
        """Register the hooks; call at most once per process."""
        made, made_optimizer = torch.nn.Module.__init__, torch.optim.Optimizer.__init__
        called: Any = torch.nn.Module._wrapped_call_impl  # the implementation of `__call__`
        ledger = self._ledger

        def init(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            made(module, *args, **kwargs)
            self._modules[id(module)] = module

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not ledger.depth and id(module) not in self._called:
                # recomputation in a backward pass calls submodules directly
                self._called.update((id(part), part) for part in module.modules())
                self._before_first_call(module)
            if not any(self._steps.values()):
                ledger.phase = "in step 1"
            ledger.depth += 1
            try:
                return called(module, *args, **kwargs)
            finally:
                ledger.depth -= 1

        def init_optimizer(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            self._optimizers[id(optimizer)] = optimizer
            self._steps[id(optimizer)] = 0
            made_optimizer(optimizer, *args, **kwargs)

        replace(torch.nn.Module, "__init__", init)
        replace(torch.nn.Module, "__call__", call)
        replace(torch.optim.Optimizer, "__init__", init_optimizer)
        register_optimizer_step_pre_hook(self._begin_step)
        register_optimizer_step_post_hook(self._end_step)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [*self._optimizers.values()]

    def steps(self) -> list[int]:
        return [self._steps[number] for number in [*self._optimizers.keys()]]

    def classify(self) -> None:
        for module in [*self._modules.values()]:
            self._classify_trained(module._parameters.values())
            for buffer in module._buffers.values():
                if buffer is not None:
                    self._ledger.classify(buffer, "buffers")
        for optimizer in self.optimizers():
            self._classify_states(optimizer)

    def _classify_trained(self, parameters: Iterable[Any]) -> None:
        for parameter in parameters:
            if parameter is not None:
                self._ledger.classify(parameter, "parameters")
                if parameter.grad is not None:
                    self._ledger.classify(parameter.grad, "gradients")

    def _classify_states(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            for leaf in tree_iter(state):
                if isinstance(leaf, torch.Tensor) and leaf is not parameter:
                    self._ledger.classify(leaf, "optimizer")

    def _begin_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.classify()
        for group in optimizer.param_groups:
            self._classify_trained(group["params"])
        self._ledger.in_step = True

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._ledger.in_step = False
        self._classify_states(optimizer)
        self._steps[id(optimizer)] += 1
        self._ledger.phase = f"in step {max(self._steps.values()) + 1}"
        self._after_step()
