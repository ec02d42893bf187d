"""Functions for tensors that are nested in lists, tuples, mappings and dataclasses."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any
from zlib import crc32

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headway.errors import Code, UsageError, WrongType


def send_to_device(
    tensor: Any, device: torch.device | str, non_blocking: bool = False, skip_keys: Any = None
) -> Any:
    """Move nested tensors, and other objects with a `.to` method, to `device`.

    Args:
        tensor: a tensor of any shape and dtype, or nested tensors.
        device: a device, such as "cuda:0".
        non_blocking: do not wait for copies from pinned memory.
        skip_keys: one or several keys of mappings; the values of these keys are not moved.

    Examples:
        >>> import torch
        >>> from headway.utils import send_to_device
        >>> send_to_device({"x": torch.ones(2), "name": "train"}, "cpu")
        {'x': tensor([1., 1.]), 'name': 'train'}
    """
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())

    def send(data: Any) -> Any:
        if isinstance(data, Mapping) and skipped:
            kept = {key: item if key in skipped else send(item) for key, item in data.items()}
            return same_kind(data, kept)
        if isinstance(data, torch.Tensor):  # torch.compile cannot trace the general case
            return data.to(device, non_blocking=non_blocking)
        if callable(getattr(data, "to", None)):
            try:
                return data.to(device, non_blocking=non_blocking)
            except TypeError:  # a `.to` that takes the device only
                return data.to(device)
        return for_each_part(send, data)

    return send(tensor)


def is_on(data: Any, device: torch.device) -> bool:
    """Return whether `data` is a tensor, or a list, tuple or dict of tensors, on `device`."""
    if isinstance(data, torch.Tensor):
        return data.device == device
    kind = type(data)
    if kind is dict:
        data = data.values()
    elif kind is not tuple and kind is not list:
        return False
    tensor = torch.Tensor
    for item in data:  # noqa: SIM110  all() takes three times as long, in every step
        if not isinstance(item, tensor) or item.device != device:
            return False
    return True


def for_each_tensor(
    function: Callable[[torch.Tensor], Any], data: Any, *, strict: str | None = None
) -> Any:
    """Apply `function` to every tensor in `data`.

    Other leaves are kept or, if `strict` is set to the operation's name, raise WrongType.
    """
    if isinstance(data, torch.Tensor):
        return function(data)
    if _is_nested(data):
        return for_each_part(
            lambda part: for_each_tensor(function, part, strict=strict), data, strict is not None
        )
    if strict is not None:
        raise WrongType(
            f"{strict}() got a {type(data).__name__}, which is neither a tensor"
            " nor a list, tuple or mapping of tensors",
            where=f"the script's {strict}(...)",
            fix="pass torch.tensor(...) on accelerator.device, or use gather_object(...)",
            code=Code.WRONG_TYPE,
        )
    return data


def for_each_part(function: Callable[[Any], Any], data: Any, is_collective: bool = False) -> Any:
    """Apply `function` to the members of a list, tuple, mapping or dataclass.

    If `function` is a collective, visit sorted keys, because their order may differ between ranks.
    """
    if isinstance(data, Mapping):
        order = sorted(data, key=_key_name) if is_collective else data
        done = {key: function(data[key]) for key in order}
        return same_kind(data, {key: done[key] for key in data})
    if isinstance(data, (list, tuple)):
        return honor_type(data, map(function, data))
    if is_dataclass_object(data):
        other = copy.copy(data)  # not replace(), which would call __init__
        for field in fields(data):
            object.__setattr__(other, field.name, function(getattr(data, field.name)))
        return other
    return data


def leaves(data: Any) -> Iterator[Any]:
    if not _is_nested(data):
        yield data
        return
    if is_dataclass_object(data):
        data = [getattr(data, field.name) for field in fields(data)]
    for part in data.values() if isinstance(data, Mapping) else data:
        yield from leaves(part)


def tensors_with_paths(data: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor with the keys of the mappings around it, in the order of collectives."""
    if isinstance(data, torch.Tensor):
        yield path, data
    elif isinstance(data, Mapping):
        for key in sorted(data, key=_key_name):
            yield from tensors_with_paths(data[key], f"{path}[{_key_name(key)}]")
    elif _is_nested(data):
        is_list = isinstance(data, (list, tuple))
        for part in data if is_list else (getattr(data, field.name) for field in fields(data)):
            yield from tensors_with_paths(part, path)


def _key_name(key: Any) -> str:
    """Return a name that is equal on all ranks; the repr of an object may contain its address."""
    return repr(key) if isinstance(key, (str, int, float)) else type(key).__name__


VALUES = 64  # number of compared values per tensor


def checksum_of(samples: Any) -> int:
    """Return a checksum of samples; unlike a pickle's checksum, it is equal in all processes."""
    return crc32(repr([*map(_value, leaves(samples))]).encode(errors="backslashreplace"))


def _value(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        is_dense = data.layout == torch.strided and not is_traceable_wrapper_subclass(data)
        return tuple(data.shape), data.flatten()[:VALUES].tolist() if is_dense else None
    if data is None or isinstance(data, (str, bytes, int, float, complex)):
        return data
    has_objects = getattr(getattr(data, "dtype", None), "hasobject", False)
    if callable(getattr(data, "tobytes", None)) and not has_objects:  # numpy arrays, PIL images
        return crc32(data.tobytes())
    return type(data).__name__  # other objects are compared by type only


def only_tensors(data: Any) -> bool:
    return all(isinstance(leaf, torch.Tensor) for leaf in leaves(data))


def _is_nested(data: Any) -> bool:
    return isinstance(data, (list, tuple, Mapping)) or is_dataclass_object(data)


def is_dataclass_object(data: Any) -> bool:
    return is_dataclass(data) and not isinstance(data, type)


def is_instance_of(data: Any, module: str, kind: str) -> bool:
    """Return whether `data` is of a class in `module`; if not imported, it has no instances."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(data, getattr(loaded, kind))


def same_kind(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Convert `items` to the type of `data`, if that type can be created from a dict."""
    try:
        return type(data)(items)  # type: ignore[call-arg]
    except TypeError:  # defaultdict and other types with other constructor arguments
        return items


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Create an object of the same type as `obj` from the items of `generator`.

    Args:
        obj: a list, a tuple or a namedtuple.
        generator: any number of items, or one per field of a namedtuple.

    Examples:
        >>> from headway.utils import honor_type
        >>> honor_type((1, 2), (2 * x for x in [1, 2]))
        (2, 4)
    """
    return type(obj)(*generator) if hasattr(obj, "_fields") else type(obj)(generator)


def slice_tensors(
    data: Any, tensor_slice: Any, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return `tensor[tensor_slice]` for every tensor in `data`.

    Args:
        tensor_slice: a slice of dimension 0, or any other index of a tensor.
        process_index: no effect; for compatibility with Accelerate.
        num_processes: no effect; for compatibility with Accelerate.

    Examples:
        >>> import torch
        >>> from headway.utils import slice_tensors
        >>> slice_tensors({"x": torch.arange(5), "name": "train"}, slice(0, 2))
        {'x': tensor([0, 1]), 'name': 'train'}
    """
    return for_each_tensor(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate equally nested structures, tensor by tensor.

    Args:
        data: structures of tensors whose shapes are equal except in `dim`.
        dim: the dimension to concatenate along.

    Returns:
        The same nesting as each element of `data`. If `data` has a single element, objects other
        than tensors are returned unchanged.

    Raises:
        WrongType: several structures contain objects other than tensors.

    Examples:
        >>> import torch
        >>> from headway.utils import concatenate
        >>> concatenate([{"x": torch.tensor([0, 1])}, {"x": torch.tensor([2])}])
        {'x': tensor([0, 1, 2])}
    """
    first = data[0]
    if isinstance(first, (tuple, list)):
        parts = (concatenate([item[index] for item in data], dim) for index in range(len(first)))
        return honor_type(first, parts)
    if isinstance(first, Mapping):
        return same_kind(
            first, {key: concatenate([item[key] for item in data], dim) for key in first}
        )
    if isinstance(first, torch.Tensor):
        return torch.cat(tuple(data), dim=dim)
    if len(data) == 1:
        return first
    raise WrongType(
        f"concatenate() got {len(data)} objects of type {type(first).__name__}, not tensors",
        where="the script's concatenate(...)",
        fix="pass a list of tensors, or of equally nested lists, tuples and mappings of tensors",
        code=Code.WRONG_TYPE,
    )


def find_batch_size(data: Any) -> int:
    """Return the size of the first tensor in `data` along dimension 0.

    Args:
        data: a tensor of shape [samples, ...], or lists, tuples and mappings of such tensors.

    Raises:
        WrongType: the first leaf is not a tensor.
        UsageError: there are no leaves.

    Examples:
        >>> import torch
        >>> from headway.utils import find_batch_size
        >>> find_batch_size({"image": torch.ones(4, 3, 8, 8), "label": torch.ones(4)})
        4
    """
    for leaf in leaves(data):
        if isinstance(leaf, torch.Tensor):
            return leaf.shape[0]
        raise WrongType(
            f"only tensors have a batch size, not a {type(leaf).__name__}",
            where="find_batch_size(...)",
            fix="make the first entry of the batch a tensor",
            code=Code.WRONG_TYPE,
        )
    raise UsageError(
        f"an empty {type(data).__name__} has no batch size",
        where="find_batch_size(...)",
        fix="pass a batch with at least one tensor",
        code=Code.BAD_ARGUMENT,
    )


def listify(data: Any) -> Any:
    """Convert every tensor in `data` to nested lists of numbers.

    Examples:
        >>> import torch
        >>> from headway.utils import listify
        >>> listify({"x": torch.arange(4).reshape(2, 2)})
        {'x': [[0, 1], [2, 3]]}
    """
    return for_each_tensor(lambda tensor: tensor.detach().tolist(), data)
