"""A FakeTensorMode for training scripts that read tensor values.

Known values of batches, indices and lengths are used, because shapes often depend on them. Unknown
numbers are assumed to be 1, and unknown shapes to be as large as possible. Unknown conditions are
assumed to have the result that is normal in training (finite, equal, not NaN). Each assumption is
noted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from headway.estimate.child.patching import is_read_by_user

_MOST_ELEMENTS = 2**16  # maximum size of a stored value
_aten = torch.ops.aten
_TRUE = {_aten.all, _aten.isfinite, _aten.eq, _aten.ge, _aten.le}
_NOT = {_aten.logical_not, _aten.bitwise_not}
_MAKERS = {
    *(_aten.arange, _aten.randint, _aten.randperm, _aten.zeros, _aten.ones, _aten.full),
    *(_aten.rand, _aten.randn, _aten.linspace, _aten.scalar_tensor, _aten.eye, _aten.tril_indices),
    *(_aten.triu_indices, _aten.bernoulli, _aten.lift_fresh),
}
"""Operators that create known values without tensor arguments, unlike `empty`."""


class ScriptMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A FakeTensorMode that assumes the unknown values and shapes that a script needs."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._note = note
        self.values = Values()
        self._has_assumed_numbers = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:
            return self.scalar(args[0])
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return self._without_shape(func, args, kwargs)
        if result is NotImplemented:
            return result
        self.values.follow(func, args, kwargs, result)
        if isinstance(result, FakeTensor):
            result.constant = None  # torch would use the constant's device, never `cpu:1`
            if result.dtype is torch.bool:
                vars(result)["_is_expected"] = _expected(func.overloadpacket, args)
        return result

    def scalar(self, tensor: torch.Tensor) -> Any:
        """Return the value of a one-element tensor, known or assumed."""
        with _disable_current_modes():
            return self._value(tensor).item()

    def array(self, tensor: torch.Tensor) -> Any:
        """Return a tensor's values as a numpy array, filled with ones if they are unknown."""
        with _disable_current_modes():
            return self._value(tensor).detach().numpy()

    def faked(self, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, FakeTensor):
            return value
        fake = self.from_tensor(value)
        with _disable_current_modes():
            self.values.keep(fake, value.detach())
        return fake

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        value = self.values.get(tensor)
        if value is None:
            fill = 1
            if tensor.dtype is torch.bool:
                fill = _assumed(tensor)
                self._note(f"assumed: a condition on unknown numbers is {fill}")
            elif not self._has_assumed_numbers and is_read_by_user():
                self._has_assumed_numbers = True
                self._note("assumed: unknown numbers that the script reads are 1; first read")
            value = torch.full(tuple(tensor.shape), fill, dtype=tensor.dtype)
        return value

    def _without_shape(self, func: Any, args: Any, kwargs: Any) -> Any:
        values = self.values.compute(func, args, kwargs)
        if values is not None:
            return tree_map_only(torch.Tensor, lambda t: self._faked_on(args[0].device, t), values)
        bound = _LARGEST.get(func.overloadpacket)
        if bound is None:
            raise DynamicOutputShapeException(func)
        self._note(f"assumed: the result of {func.overloadpacket.__name__} has its maximum size")
        with self:
            return bound(*args, **kwargs)

    def _faked_on(self, device: torch.device, value: torch.Tensor) -> Any:
        fake: Any = self.faked(value)
        fake.fake_device = device
        return fake


def _assumed(tensor: Any) -> bool:
    return bool(getattr(tensor, "_is_expected", False))


def _expected(operator: Any, args: Any) -> bool:
    """Return the expected result of a boolean operator in normal training."""
    infinite = len(args) > 1 and isinstance(args[1], float) and math.isinf(args[1])
    if operator is _aten.ne:
        return infinite
    if operator in _TRUE:
        return not (operator is _aten.eq and infinite)
    given = [
        _assumed(arg) for arg in args if isinstance(arg, torch.Tensor) and arg.dtype is torch.bool
    ]
    return bool(given) and all(given) != (operator in _NOT)


def _unique(x: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    counts = x.new_empty(x.numel(), dtype=torch.int64)
    return x.new_empty(x.numel()), x.new_empty(x.shape, dtype=torch.int64), counts


_LARGEST: dict[Any, Callable[..., Any]] = {
    _aten.nonzero: lambda x: x.new_empty((x.numel(), x.dim()), dtype=torch.int64),
    _aten.masked_select: lambda x, _: x.new_empty(x.numel()),
    _aten._unique2: _unique,
    _aten.bincount: lambda x, _=None, minlength=0: x.new_empty(
        max(minlength, 1), dtype=torch.int64
    ),
    _aten.repeat_interleave: lambda x, *, output_size=None: x.new_empty(output_size or x.numel()),
}
"""Results of the maximum size, by operator."""


class Values:
    """The values of small fake tensors, computed by applying the same operators to real tensors.

    A fake tensor has a value if all inputs of its operator have values. An in-place write of
    unknown values to a tensor discards the values of the tensor and of its views.
    """

    def __init__(self) -> None:
        self._values: Any = WeakIdKeyDictionary()
        self._stale: Any = WeakIdKeyDictionary()

    def keep(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        if value.numel() <= _MOST_ELEMENTS and value.layout is torch.strided:
            self._values[fake] = value

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.numel() <= _MOST_ELEMENTS else None
        value: torch.Tensor | None = self._values.get(tensor)
        return None if value is None or value.untyped_storage() in self._stale else value

    def follow(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        """Compute the values of small results, if the values of the operator's inputs are known."""
        fakes = [leaf for leaf in tree_iter(results) if isinstance(leaf, torch.Tensor)]
        is_small = all(fake.numel() <= _MOST_ELEMENTS for fake in fakes)
        values = self.compute(func, args, kwargs) if is_small else None
        if values is None:
            self._discard_written(func, args, kwargs)
            return
        for fake, value in zip(tree_iter(results), tree_iter(values), strict=True):
            if isinstance(fake, FakeTensor) and fake.device.type != "meta":
                self.keep(fake, value)

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Apply an operator to the values of its arguments; return None if any value is unknown."""
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = [self.get(tensor) for tensor in tensors]
        if any(value is None for value in known) or not (known or func.overloadpacket in _MAKERS):
            return None
        replaced = {id(tensor): value for tensor, value in zip(tensors, known, strict=True)}
        args, kwargs = tree_map_only(torch.Tensor, lambda t: replaced[id(t)], (args, kwargs))
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        with unset_fake_temporarily(), torch.no_grad():
            return func(*args, **kwargs)

    def _discard_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = kwargs.get(argument.name, args[index] if index < len(args) else None)
            for leaf in tree_iter(written):
                if isinstance(leaf, FakeTensor) and leaf in self._values:
                    self._stale[self._values[leaf].untyped_storage()] = True
