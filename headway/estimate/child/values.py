"""The values that a run without memory knows all the same: those of batches, indices and lengths.

Shapes often depend on them, and what the script does next.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

MOST_ELEMENTS = 2**16
_aten = torch.ops.aten

_MAKERS = {
    *(_aten.arange, _aten.randint, _aten.randperm, _aten.zeros, _aten.ones, _aten.full),
    *(_aten.rand, _aten.randn, _aten.linspace, _aten.scalar_tensor, _aten.eye, _aten.tril_indices),
    *(_aten.triu_indices, _aten.bernoulli, _aten.lift_fresh),
}
"""Operators whose results are known without any tensor; not `empty`, which has no values."""


class Values:
    """Small real tensors beside fake ones, computed by the same operators.

    A fake tensor has a value when all that it was made of has one. What is written with unknown
    values loses its own, as do all views of it.
    """

    def __init__(self) -> None:
        self._values: Any = WeakIdKeyDictionary()
        self._stale: Any = WeakIdKeyDictionary()

    def keep(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        """Remember the value of a fake tensor, unless it is large."""
        if value.numel() <= MOST_ELEMENTS and value.layout is torch.strided:
            self._values[fake] = value

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value of a tensor, or None where it is not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.numel() <= MOST_ELEMENTS else None
        value = self._values.get(tensor)
        if value is None or value.untyped_storage() in self._stale:
            return None
        known: torch.Tensor = value
        return known

    def follow(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        """Compute the values of an operator's results, where they can be known and are small."""
        fakes = [one for one in tree_iter(results) if isinstance(one, torch.Tensor)]
        if any(one.numel() > MOST_ELEMENTS for one in fakes):
            self._forget_written(func, args, kwargs)
            return
        values = self.compute(func, args, kwargs)
        if values is None:
            self._forget_written(func, args, kwargs)
        else:
            self.keep_all(results, values)

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operator gives for the values of its arguments; None if one is unknown."""
        tensors = [one for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor)]
        known = [self.get(one) for one in tensors]
        if any(one is None for one in known) or not (known or func.overloadpacket in _MAKERS):
            return None
        replaced = {id(one): value for one, value in zip(tensors, known, strict=True)}
        args, kwargs = tree_map_only(torch.Tensor, lambda one: replaced[id(one)], (args, kwargs))
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        with unset_fake_temporarily(), torch.no_grad():
            return func(*args, **kwargs)

    def keep_all(self, results: Any, values: Any) -> None:
        """Remember the values of an operator's results."""
        for fake, value in zip(tree_iter(results), tree_iter(values), strict=True):
            if isinstance(fake, FakeTensor) and fake.device.type != "meta":
                self.keep(fake, value)

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = kwargs.get(argument.name, args[index] if index < len(args) else None)
            for one in tree_iter(written):
                value = self._values.get(one) if isinstance(one, FakeTensor) else None
                if value is not None:
                    self._stale[value.untyped_storage()] = True
