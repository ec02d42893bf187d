"""Encodes the Python values of state dicts as JSON; tensors are stored separately by name.

Types without a JSON equivalent are encoded as an object with a single key for the type:
`{"tuple": [...]}`, `{"dict": [[key, value], ...]}`, `{"counter": [[key, count], ...]}`,
`{"tensor": NAME}`, `{"sharded": NAME}` (a DTensor), `{"array": NAME}` (numpy),
`{"number": "nan"}`, `{"bytes": BASE64}`, `{"set": [...]}`, `{"complex": [real, imaginary]}`,
`{"scalar": NUMBER}` (an optimizer's float32 tensor without dimensions; a tensor takes 0.1 ms).
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from headway.errors import CheckpointError, Code

Json = Any
_MAX_DEPTH = 100
"""Maximum nesting of lists, tuples, sets and dicts, well below the limit of Python's reader."""
_MAX_NAME = 80  # characters in a message
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(
    value: Any, name: str, tensors: MutableMapping[str, torch.Tensor], depth: int = 0
) -> Json:
    """Return a value as JSON, and add its tensors and arrays to `tensors`.

    The value may be None, a number, a string, bytes, a tensor, a numpy array or a numpy number, or
    lists, tuples, sets and dicts of these. A tensor's name is `name` followed by its path in the
    value; `depth` is the number of containers around the value.

    Raises:
        CheckpointError: the value contains other objects or cycles, or is nested too deeply.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, torch.Tensor):
        is_scalar = value.is_cpu and value.dim() == 0 and value.dtype is torch.float32
        is_plain, part = type(value) is torch.Tensor, name.partition(".")[2]
        if is_scalar and is_plain and part.startswith("optimizers."):  # not a model's weight
            return {"scalar": encode(value.item(), name, tensors)}
        tag = "sharded" if isinstance(value, DTensor) else "tensor"
        return {tag: _add(_plain(value.detach(), name), name, tensors)}
    if depth > _MAX_DEPTH:
        raise CheckpointError(
            f"{name[:_MAX_NAME]}... cannot be saved: it is nested more than {_MAX_DEPTH} levels"
            " deep, or contains itself",
            where="the state_dict() that returns it",
            fix="return a flatter value without cycles from state_dict()",
            code=Code.UNSAVABLE,
        )
    if kind is list:
        return _encode_many(value, name, tensors, depth)
    if isinstance(value, Counter):
        return {"counter": _encode_dict(value, name, tensors, depth)}
    if isinstance(value, dict):  # an OrderedDict, defaultdict, ... becomes a dict
        return {"dict": _encode_dict(value, name, tensors, depth)}
    for known, tag, write in _KINDS:
        if isinstance(value, known):
            return {tag: write(value, name, tensors, depth)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"number": str(float(value))}
    return _encode_numpy(value, name, tensors)


def _plain(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return `tensor`; raise CheckpointError unless it is a dense, plain tensor that has data.

    torch can save other tensors, but can load them only with pickle.
    """
    odd = ""
    if type(tensor) is not torch.Tensor and not isinstance(tensor, DTensor):
        odd = f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
    elif tensor.is_nested:
        odd = "a nested tensor"
    elif tensor.layout is not torch.strided:
        odd = f"a tensor of layout {tensor.layout}"
    elif tensor.is_quantized:
        odd = "a quantized tensor"
    elif tensor.is_meta:
        odd = "a meta tensor without data"
    if odd:
        raise CheckpointError(
            f"{name} is {odd}, which cannot be saved",
            where="the state_dict() that returns it",
            fix="state_dict() must return only dense tensors that hold data, such as a sparse"
            " tensor's indices and values",
            code=Code.UNSAVABLE,
        )
    return tensor


def _add(tensor: torch.Tensor, name: str, tensors: MutableMapping[str, torch.Tensor]) -> str:
    """Add a tensor under this name, appending "+" until the name is unused; return the name."""
    while name in tensors:
        name += "+"
    tensors[name] = tensor
    return name


def _encode_dict(
    value: Mapping[Any, Any], name: str, tensors: MutableMapping[str, torch.Tensor], depth: int
) -> list[Json]:
    return [
        [
            encode(key, f"{name}.key{index}", tensors, depth + 1),
            encode(pair, f"{name}.{key}", tensors, depth + 1),
        ]
        for index, (key, pair) in enumerate(value.items())
    ]


def _encode_many(
    value: Any, name: str, tensors: MutableMapping[str, torch.Tensor], depth: int
) -> list[Json]:
    return [
        part if type(part) is int else encode(part, f"{name}.{index}", tensors, depth + 1)
        for index, part in enumerate(value)
    ]


_KINDS: tuple[tuple[type, str, Callable[..., Json]], ...] = (
    (tuple, "tuple", _encode_many),  # also torch.Size and named tuples
    (set, "set", _encode_many),
    (bytes, "bytes", lambda value, *_: base64.b64encode(value).decode()),
    (complex, "complex", lambda value, *_: [value.real, value.imag]),
)


def _encode_numpy(value: Any, name: str, tensors: MutableMapping[str, torch.Tensor]) -> Json:
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return encode(value.item(), name, tensors)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        contiguous = np.ascontiguousarray(value).reshape(value.shape)  # scalars stay 0-d
        return {"array": _add(torch.from_numpy(contiguous), name, tensors)}
    raise CheckpointError(
        f"{name} is {type(value).__module__}.{type(value).__qualname__}, which cannot be saved",
        where="the state_dict() that returns it",
        fix="return only tensors, numbers, strings, lists, tuples and dicts from state_dict(), and"
        " rebuild the object from them in load_state_dict()",
        code=Code.UNSAVABLE,
    )


def decode(value: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Decode a result of `encode`; raise ValueError for other values."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [decode(part, tensors) for part in value]
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("invalid encoded value")
    ((tag, content),) = value.items()
    try:
        return _DECODERS[tag](content, tensors)
    except (KeyError, TypeError, binascii.Error) as error:
        raise ValueError(f"invalid encoded value of type {tag!r}: {error}") from None


def _decode_dict(content: Json, tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    return {decode(key, tensors): decode(part, tensors) for key, part in content}


_DECODERS: dict[str, Callable[[Any, Mapping[str, torch.Tensor]], Any]] = {
    "dict": _decode_dict,
    "counter": lambda content, tensors: Counter(_decode_dict(content, tensors)),
    "tuple": lambda content, tensors: tuple(decode(part, tensors) for part in content),
    "set": lambda content, tensors: {decode(part, tensors) for part in content},
    "bytes": lambda content, _: base64.b64decode(content, validate=True),
    "complex": lambda content, _: complex(*content),
    "number": lambda content, _: _NON_FINITE[content],
    "scalar": lambda content, _: torch.tensor(float(decode(content, {})), dtype=torch.float32),
    "tensor": lambda content, tensors: tensors[content],
    "sharded": lambda content, tensors: tensors[content],
    "array": lambda content, tensors: tensors[content].numpy(),
}


def tensor_names(value: Json, tags: Collection[str] = ("tensor", "sharded", "array")) -> set[str]:
    """Return the names of the tensors that have one of these tags in an encoded value."""
    if isinstance(value, list):
        return set().union(*(tensor_names(part, tags) for part in value))
    if not isinstance(value, dict):
        return set()
    names = {value[tag] for tag in tags if isinstance(value.get(tag), str)}
    return names.union(*(tensor_names(part, tags) for part in value.values()))
