"""Lists, tuples, mappings and dataclasses that hold tensors: walks that keep their kind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from headway.errors import UsageError


def send_to_device(
    tensor: Any, device: torch.device | str, non_blocking: bool = False, skip_keys: Any = None
) -> Any:
    """Return nested tensors, and other objects with a `.to` method, on `device`.

    Args:
        tensor: tensors of any shapes and dtypes, alone or nested.
        device: such as "cuda:0".
        non_blocking: do not wait for copies from pinned memory.
        skip_keys: key or keys of a mapping whose values stay where they are.

    Examples:
        >>> import torch
        >>> from headway.utils import send_to_device
        >>> send_to_device({"x": torch.ones(2), "name": "train"}, "cpu")
        {'x': tensor([1., 1.]), 'name': 'train'}
    """
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())

    def send(data: Any) -> Any:
        if isinstance(data, Mapping) and skipped:
            kept = {key: one if key in skipped else send(one) for key, one in data.items()}
            return same_kind(data, kept)
        if callable(getattr(data, "to", None)):
            try:
                return data.to(device, non_blocking=non_blocking)
            except TypeError:  # a `.to` that takes the device only
                return data.to(device)
        return for_each_part(send, data)

    return send(tensor)


def is_on(data: Any, device: torch.device) -> bool:
    """Return whether `data` is a tensor, or a list, tuple or dict of nothing else, on `device`."""
    if isinstance(data, torch.Tensor):
        return data.device == device
    kind = type(data)
    if kind is dict:
        data = data.values()
    elif kind is not tuple and kind is not list:
        return False
    tensor = torch.Tensor
    for one in data:  # noqa: SIM110  all() takes three times as long, in every step
        if not isinstance(one, tensor) or one.device != device:
            return False
    return True


def for_each_tensor(
    function: Callable[[torch.Tensor], Any], data: Any, *, strict: str | None = None
) -> Any:
    """Return `data` with `function` applied to every tensor in its lists, tuples and mappings.

    Args:
        strict: name of the operation that takes tensors only; None lets other leaves pass.

    Raises:
        UsageError: a leaf is no tensor, and `strict` is given.
    """
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, (list, tuple, Mapping)) or _is_dataclass(data):
        return for_each_part(lambda one: for_each_tensor(function, one, strict=strict), data)
    if strict is not None:
        raise UsageError(
            f"{strict}() got a {type(data).__name__}, which is neither a tensor"
            " nor a list, tuple or mapping of tensors",
            where=f"the script's {strict}(...)",
            fix="pass torch.tensor(...) on accelerator.device, or use gather_object(...)",
        )
    return data


def leaves(data: Any) -> Iterator[Any]:
    """Yield what the lists, tuples, mappings and dataclasses of nested `data` hold in the end."""
    if isinstance(data, Mapping):
        parts = iter(data.values())
    elif isinstance(data, (list, tuple)):
        parts = iter(data)
    elif _is_dataclass(data):
        parts = (getattr(data, field.name) for field in fields(data))
    else:
        yield data
        return
    for part in parts:
        yield from leaves(part)


def only_tensors(data: Any) -> bool:
    """Return whether all leaves of nested `data` are tensors."""
    return all(isinstance(leaf, torch.Tensor) for leaf in leaves(data))


def for_each_part(function: Callable[[Any], Any], data: Any) -> Any:
    """Return a list, tuple, mapping or dataclass with `function` applied to what it holds."""
    if isinstance(data, Mapping):
        return same_kind(data, {key: function(one) for key, one in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*map(function, data))
    if isinstance(data, (list, tuple)):
        return type(data)(map(function, data))
    if _is_dataclass(data):
        other = copy.copy(data)  # not replace(): it would call __init__, which may do anything
        for field in fields(data):
            object.__setattr__(other, field.name, function(getattr(data, field.name)))
        return other
    return data


def _is_dataclass(data: Any) -> bool:
    return is_dataclass(data) and not isinstance(data, type)


def same_kind(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return `items` as the same kind of mapping as `data`, where that can be built from a dict."""
    try:
        return type(data)(items)  # type: ignore[call-arg]
    except TypeError:  # defaultdict and others with arguments of their own
        return items
