"""torch's FakeTensorMode, as ordinary training scripts need it: they look at values, too.

A value that is known (`values.py`) is used. Otherwise a number is 1, and a condition is what it is
while training goes well: finite, equal, not NaN. A shape that depends on unknown values is as large
as it can be, which is noted.
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
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from headway.estimate.child.values import Values

_aten = torch.ops.aten
_TRUE = {_aten.all, _aten.isfinite, _aten.eq, _aten.ge, _aten.le}
_AND = {_aten.mul, _aten.logical_and, _aten.bitwise_and}
_OR = {_aten.logical_or, _aten.bitwise_or, _aten.add}
_NOT = {_aten.logical_not, _aten.bitwise_not}
_AS_BEFORE = {
    *(_aten.any, _aten._to_copy, _aten.clone, _aten.detach, _aten.alias, _aten.view, _aten.select),
    *(_aten.min, _aten.max, _aten.squeeze, _aten.unsqueeze, _aten.prod, _aten.expand),
}


class ScriptMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A FakeTensorMode in which a training script runs through.

    Args:
        note: is called with each shape that was bounded.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._note = note
        self.values = Values()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:
            return self.scalar(args[0])
        if func is _aten._pack_padded_sequence.default:
            return self._packed(*args)
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return self._without_shape(func, args, kwargs)
        if result is NotImplemented:
            return result
        self.values.follow(func, args, kwargs, result)
        if isinstance(result, FakeTensor):
            result.constant = None  # torch's own value, of which it takes the device: never `cpu:1`
            if result.dtype is torch.bool:
                _set_truth(result, _expected(func.overloadpacket, args))
        return result

    def scalar(self, tensor: torch.Tensor) -> Any:
        """Return the number in a tensor of one element, or what it is taken for."""
        value = self.values.get(tensor)
        if value is not None:
            with _disable_current_modes():
                return value.item()
        if tensor.dtype is torch.bool:
            return _truth(tensor)
        return _one(tensor.dtype)

    def array(self, tensor: torch.Tensor) -> Any:
        """Return the numpy array of a tensor's values, or of ones."""
        with _disable_current_modes():
            value = self.values.get(tensor)
            if value is None:
                fill = _truth(tensor) if tensor.dtype is torch.bool else 1
                value = torch.full(tuple(tensor.shape), fill, dtype=tensor.dtype)
            return value.detach().numpy()

    def faked(self, value: torch.Tensor) -> torch.Tensor:
        """Return the fake tensor of a real one, with its value."""
        if isinstance(value, FakeTensor):
            return value
        fake = self.from_tensor(value)
        with _disable_current_modes():
            self.values.keep(fake, value.detach())
        return fake

    def _without_shape(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of an operator whose shapes depend on values."""
        values = self.values.compute(func, args, kwargs)
        if values is not None:
            return tree_map_only(
                torch.Tensor, lambda one: self._on(self.faked(one), args[0].device), values
            )
        bound = _LARGEST.get(func.overloadpacket)
        if bound is None:
            raise DynamicOutputShapeException(func)
        self._note(f"{func.overloadpacket.__name__}: its result is taken to be as large as can be")
        with self:
            return bound(*args, **kwargs)

    def _packed(
        self, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return packed sequences, with real batch sizes: torch reads them in C++."""
        batch, longest = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
        known = self.values.get(lengths)
        if known is None:
            self._note("pack_padded_sequence: all sequences are taken to be as long as the longest")
            known = torch.full((batch,), longest)
        each = (known.unsqueeze(0) > torch.arange(int(known.max())).unsqueeze(1)).sum(1)
        with self:
            return x.new_empty(int(each.sum()), *x.shape[2:]), each

    def _on(self, fake: Any, device: torch.device) -> torch.Tensor:
        fake.fake_device = device
        found: torch.Tensor = fake
        return found


def _one(dtype: torch.dtype) -> complex:
    if dtype.is_complex:
        return complex(1)
    return 1.0 if dtype.is_floating_point else 1


def _truth(tensor: Any) -> bool:
    return bool(getattr(tensor, "_is_expected", False))


def _set_truth(tensor: Any, is_true: bool) -> None:
    tensor._is_expected = is_true


def _expected(operator: Any, args: Any) -> bool:
    """Return what the elements of an operator's result are while training goes well."""
    infinite = len(args) > 1 and isinstance(args[1], float) and math.isinf(args[1])
    if operator is _aten.ne:
        return infinite
    if operator is _aten.eq and infinite:
        return False
    if operator in _TRUE:
        return True
    given = [_of(one) for one in args[:2]]
    if operator in _AND:
        return all(given)
    if operator in _OR:
        return any(given)
    if operator in _NOT:
        return not given[0]
    return operator in _AS_BEFORE and given[0]


def _of(argument: Any) -> bool:
    return _truth(argument) if isinstance(argument, torch.Tensor) else bool(argument)


def _nonzero(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.numel(), x.dim()), dtype=torch.int64)


def _masked_select(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.numel())


def _unique(x: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    counts = x.new_empty(x.numel(), dtype=torch.int64)
    return x.new_empty(x.numel()), x.new_empty(x.shape, dtype=torch.int64), counts


def _bincount(x: torch.Tensor, _: Any = None, minlength: int = 0) -> torch.Tensor:
    return x.new_empty(max(minlength, 1), dtype=torch.int64)


def _repeated(x: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
    return x.new_empty(output_size or x.numel())


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    length, batch, _classes = log_probs.shape
    most = targets.shape[-1]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, length, 2 * most + 1)


_LARGEST: dict[Any, Callable[..., Any]] = {
    _aten.nonzero: _nonzero,
    _aten.masked_select: _masked_select,
    _aten._unique2: _unique,
    _aten.bincount: _bincount,
    _aten.repeat_interleave: _repeated,
    _aten._ctc_loss: _ctc_loss,
}
"""The results with the largest shapes that there can be, by operator."""
