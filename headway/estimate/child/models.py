"""The script's modules and optimizers, as they are made and called."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_iter

from headway.estimate.child.ledger import ACTIVATIONS, Ledger
from headway.estimate.child.replacing import replace

T = TypeVar("T")
Alive = weakref.WeakValueDictionary[int, T]


class Models:
    """Follows a script's modules and optimizers, and tells the ledger what their tensors are.

    Args:
        ledger: whose entries get their categories, and the modules that made them.
        before_first_call: is called with each model before its first forward pass.
        after_step: is called after each optimizer step.
    """

    def __init__(
        self,
        ledger: Ledger,
        before_first_call: Callable[[torch.nn.Module], None],
        after_step: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._before_first_call = before_first_call
        self._after_step = after_step
        # by id: a class of the script's may have a hash of its own
        self._modules: Alive[torch.nn.Module] = weakref.WeakValueDictionary()
        self._called: Alive[torch.nn.Module] = weakref.WeakValueDictionary()
        self._optimizers: Alive[torch.optim.Optimizer] = weakref.WeakValueDictionary()
        self._steps: dict[int, int] = {}
        self.ends_steps = True  # whether `after_step` is called

    def follow(self) -> None:
        """Begin; to be called once in a process."""
        self._follow_modules()
        made = torch.optim.Optimizer.__init__

        def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            self._optimizers[id(optimizer)] = optimizer
            self._steps[id(optimizer)] = 0
            made(optimizer, *args, **kwargs)

        replace(torch.optim.Optimizer, "__init__", init)
        register_optimizer_step_pre_hook(self._begin_step)
        register_optimizer_step_post_hook(self._end_step)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return those that are alive."""
        return [*self._optimizers.values()]

    def steps(self) -> list[int]:
        """Return how many steps each optimizer that is alive has made."""
        return [self._steps[number] for number in [*self._optimizers.keys()]]

    def roots(self) -> Iterator[torch.nn.Module]:
        """Yield the modules that are part of no other and have parameters."""
        inner = {id(child) for module in [*self._modules.values()] for child in module.children()}
        for module in [*self._modules.values()]:
            if id(module) not in inner and any(True for _ in module.parameters()):
                yield module

    def names(self) -> dict[int, str]:
        """Return the names of all modules in their models, by id."""
        roots = [*self.roots()]
        found: dict[int, str] = {}
        for root in roots:
            if isinstance(root, DistributedDataParallel):
                found[id(root)], root = "DistributedDataParallel", root.module
            prefix = "" if len(roots) == 1 else f"{type(root).__name__}."
            for name, module in root.named_modules():
                found.setdefault(id(module), f"{prefix}{name}".rstrip(".") or type(root).__name__)
        return found

    def classify(self) -> None:
        """Say what the tensors of all modules and optimizers are for."""
        for module in [*self._modules.values()]:
            owner = weakref.ref(module)
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._ledger.classify(parameter, "parameters", owner)
                    if parameter.grad is not None:
                        self._ledger.classify(parameter.grad, "gradients", owner)
            for buffer in module._buffers.values():
                if buffer is not None:
                    self._ledger.classify(buffer, "buffers", owner)
        for optimizer in self.optimizers():
            self._classify_states(optimizer)

    def _follow_modules(self) -> None:
        made = torch.nn.Module.__init__
        called: Any = torch.nn.Module._wrapped_call_impl  # what `__call__` is
        running = self._ledger.modules

        def init(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            made(module, *args, **kwargs)
            self._modules[id(module)] = module

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not running and id(module) not in self._called:
                # what is recomputed in a backward pass calls its parts by themselves
                self._called.update((id(one), one) for one in module.modules())
                self._before_first_call(module)
            running.append(weakref.ref(module))
            try:
                return called(module, *args, **kwargs)
            finally:
                running.pop()

        replace(torch.nn.Module, "__init__", init)
        replace(torch.nn.Module, "__call__", call)

    def _begin_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.classify()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._ledger.classify(parameter, "parameters")
                if parameter.grad is not None:
                    self._ledger.classify(parameter.grad, "gradients")
        self._ledger.default_category = "optimizer"

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._ledger.default_category = ACTIVATIONS
        self._classify_states(optimizer)
        self._steps[id(optimizer)] += 1
        if self.ends_steps:
            self._after_step()

    def _classify_states(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            owner = self._ledger.owner_of(parameter)
            for one in tree_iter(state):
                if isinstance(one, torch.Tensor) and one is not parameter:
                    self._ledger.classify(one, "optimizer", owner)
