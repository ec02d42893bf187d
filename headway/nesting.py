"""Lists, tuples and mappings of tensors: apply, slice, join, describe. No rank talks to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.collectives import same_kind
from headway.errors import WrongType, WrongValue


@dataclass
class TensorInformation:
    """The shape and dtype of a tensor, without its values."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: object) -> bool:
    """Return whether `tensor` is a torch.Tensor."""
    return isinstance(tensor, torch.Tensor)


def is_tensor_information(tensor_info: object) -> bool:
    """Return whether `tensor_info` describes a tensor, as `get_data_structure` does."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: object) -> bool:
    """Return whether `data` is a tuple with named fields."""
    return isinstance(data, tuple) and hasattr(data, "_fields") and hasattr(data, "_asdict")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return the items of `generator` as the same kind of list or tuple as `obj`."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Return `data` with `func(leaf, *args, **kwargs)` in place of every leaf of a type.

    Args:
        data: a leaf, or leaves nested in lists, tuples and mappings, whose types are kept.
        test_type: whether `func` takes a leaf.
        error_on_other_type: refuse other leaves instead of keeping them as they are.

    Raises:
        WrongType: another leaf, with `error_on_other_type`.
    """

    def apply(one: Any) -> Any:
        if isinstance(one, (tuple, list)):
            return honor_type(one, map(apply, one))
        if isinstance(one, Mapping):
            return same_kind(one, {key: apply(value) for key, value in one.items()})
        if test_type(one):
            return func(one, *args, **kwargs)
        if error_on_other_type:
            name = getattr(func, "__name__", repr(func))
            raise WrongType(
                f"{name}() cannot be applied to a {type(one).__name__}, which"
                f" {getattr(test_type, '__name__', test_type)}() does not take",
                where="the script's recursively_apply(...)",
                fix="pass nested lists, tuples and mappings of such objects only",
            )
        return one

    return apply(data)


def slice_tensors(
    data: Any, tensor_slice: Any, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return `tensor[tensor_slice]` for every tensor in `data`.

    Args:
        tensor_slice: a slice of dimension 0, or anything else that a tensor can be indexed by.
        process_index, num_processes: not needed; Accelerate's signature has them.
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Join equally nested structures, tensor by tensor.

    Args:
        data: structures of tensors that have equal shapes but in `dim`.
        dim: the dimension to join along.

    Returns:
        The same nesting as each of `data`. What is neither a tensor nor nested can be joined only
        if it is the only one, and is returned as it is.

    Raises:
        WrongType: several of something else.
    """
    first = data[0]
    if isinstance(first, (tuple, list)):
        parts = (concatenate([one[index] for one in data], dim) for index in range(len(first)))
        return honor_type(first, parts)
    if isinstance(first, Mapping):
        return same_kind(
            first, {key: concatenate([one[key] for one in data], dim) for key in first}
        )
    if isinstance(first, torch.Tensor):
        return torch.cat(tuple(data), dim=dim)
    if len(data) == 1:
        return first
    raise WrongType(
        f"concatenate() got {len(data)} objects of type {type(first).__name__}, not tensors",
        where="the script's concatenate(...)",
        fix="pass a list of tensors, or of equally nested lists, tuples and mappings of tensors",
    )


def find_batch_size(data: Any) -> int:
    """Return the size of the first tensor in `data` along dimension 0.

    Raises:
        WrongType: the first leaf is no tensor.
        WrongValue: there is no leaf.
    """
    if isinstance(data, (tuple, list, Mapping)):
        if not data:
            raise WrongValue(
                f"an empty {type(data).__name__} has no batch size",
                where="find_batch_size(...)",
                fix="pass a batch with at least one tensor",
            )
        return find_batch_size(next(iter(data.values() if isinstance(data, Mapping) else data)))
    if not isinstance(data, torch.Tensor):
        raise WrongType(
            f"only tensors have a batch size, not a {type(data).__name__}",
            where="find_batch_size(...)",
            fix="let the first entry of the batch be a tensor",
        )
    return data.shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return `find_batch_size(data)`, or None where there is none."""
    try:
        return find_batch_size(data)
    except (WrongType, WrongValue):
        return None


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in `data`; None without a tensor."""
    if isinstance(data, torch.Tensor):
        return data.device
    parts = data.values() if isinstance(data, Mapping) else data
    if isinstance(data, (tuple, list, Mapping)):
        return next((found for one in parts if (found := find_device(one)) is not None), None)
    return None


def listify(data: Any) -> Any:
    """Return `data` with every tensor as nested lists of numbers."""
    return recursively_apply(lambda tensor: tensor.detach().tolist(), data)


def get_data_structure(data: Any) -> Any:
    """Return `data` with a `TensorInformation` in place of every tensor."""
    return recursively_apply(lambda one: TensorInformation(one.shape, one.dtype), data)


def get_shape(data: Any) -> Any:
    """Return `data` with the shape, as a list of sizes, in place of every tensor."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Return uninitialized tensors on the CPU for what `get_data_structure` returned."""
    return recursively_apply(
        lambda one: torch.empty(one.shape, dtype=one.dtype),
        data_structure,
        test_type=is_tensor_information,
    )


def merge_dicts(source: Mapping[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Write the entries of `source` into `destination`, mapping by mapping, and return it."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination
