"""Selects a model's units, each of which is sharded, gathered or checkpointed as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from headway.errors import Code, UsageError, suggestion

Module = torch.nn.Module
_LISTS = (torch.nn.ModuleList, torch.nn.Sequential)
_NOT_CALLED = (torch.nn.ModuleList, torch.nn.ModuleDict)  # only their members' forward() is called


def units_of(model: Module, wrap: str = "auto") -> list[Module]:
    """Return the units of `model`, innermost first; all other modules belong to the root unit.

    A module that shares a parameter with a module outside of it is not a unit.

    Args:
        wrap: `auto` for blocks whose class is repeated in a ModuleList or Sequential;
            comma-separated class names; or the minimum number of parameters of a unit.

    Raises:
        UsageError: the model has no module of a class in `wrap`.
    """
    if wrap == "auto":
        chosen = {*_repeated(model)}
    elif wrap.isdecimal():
        chosen = _of_size(model, int(wrap))
    else:
        chosen = _of_classes(model, wrap.split(","))
    return [
        module
        for module in reversed([*model.modules()])
        if module in chosen - {model} and {*module.parameters()}.isdisjoint(_outside(model, module))
    ]


def _outside(model: Module, unit: Module) -> Iterator[torch.nn.Parameter]:
    seen, left = {unit}, [model]
    while left:
        module = left.pop()
        if module not in seen:
            seen.add(module)
            yield from module.parameters(recurse=False)
            left += module.children()


def _repeated(model: Module) -> Iterator[Module]:
    """Yield the outermost modules that have parameters and whose class is repeated in a list."""
    members = list(model.children())
    counts = Counter(type(member) for member in members) if isinstance(model, _LISTS) else Counter()
    for member in members:
        is_block = counts[type(member)] > 1 and any(True for _ in member.parameters())
        if is_block and not isinstance(member, (*_LISTS, *_NOT_CALLED)):
            yield member
            continue
        inner = list(_repeated(member))
        has_blocks = any(True for block in inner for _ in block.children())  # otherwise layers
        if is_block and not has_blocks and not isinstance(member, _NOT_CALLED):
            yield member
        else:
            yield from inner


def _of_classes(model: Module, names: Sequence[str]) -> set[Module]:
    found = {type(module).__name__ for module in model.modules()}
    for name in names:
        if name not in found:
            raise UsageError(
                f"wrap is {','.join(names)!r}, but {type(model).__name__} contains no module of"
                f" class {name!r}{suggestion(name, sorted(found))}",
                where="the setting wrap",
                fix="use a class name that print(model) shows, or set wrap to auto",
                code=Code.BAD_ARGUMENT,
            )
    return {
        module
        for module in model.modules()
        if type(module).__name__ in names and not isinstance(module, _NOT_CALLED)
    }


def _of_size(model: Module, minimum: int) -> set[Module]:
    """Return the innermost modules with at least `minimum` parameters outside of inner units."""
    chosen: set[Module] = set()

    def visit(module: Module) -> int:
        own = sum(p.numel() for p in module.parameters(recurse=False))
        count = own + sum(visit(child) for child in module.children())
        if count < minimum or isinstance(module, _NOT_CALLED):
            return count
        chosen.add(module)
        return 0

    visit(model)
    return chosen


def checkpoint_activations(blocks: Iterable[torch.nn.Module]) -> None:
    """Checkpoint the activations of each block, without changing parameter names."""
    for block in blocks:
        if not isinstance(block.forward, _CheckpointedForward):
            norms = [
                m for m in block.modules() if getattr(m, "num_batches_tracked", None) is not None
            ]
            block.forward = _CheckpointedForward(block.forward, norms)


class _CheckpointedForward:
    """A callable object instead of a closure, so that a copied block calls its own forward.

    The recomputation does not update the running statistics of `norms` a second time.
    """

    def __init__(self, forward: Callable[..., Any], norms: list[Any]) -> None:
        self.__wrapped__ = forward  # read by inspect.signature()
        self._norms = norms

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        if self._norms and not torch.compiler.is_compiling():  # which updates them only once
            kwargs["context_fn"] = lambda: (nullcontext(), self._without_updates())
        return checkpoint(self.__wrapped__, *args, use_reentrant=False, **kwargs)

    @contextmanager
    def _without_updates(self) -> Iterator[None]:
        usual = [(norm, norm.momentum, norm.num_batches_tracked) for norm in self._norms]
        for norm in self._norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None
        try:
            yield
        finally:
            for norm, momentum, number in usual:
                norm.momentum, norm.num_batches_tracked = momentum, number
