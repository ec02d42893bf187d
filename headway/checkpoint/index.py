"""Reads the index of a checkpoint's tensors, which torch writes as a pickle, without unpickling it.

The opcodes that such an index has are followed here, and make numbers, texts, lists and names of
classes; nothing is imported, called or set. Only then torch's own objects are made of them.
Source: pickletools of the standard library; torch/distributed/checkpoint/metadata.py, 2.11 to 2.13.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

_HERE = "torch.distributed.checkpoint"
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"}
_NEW: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
_LENGTHS = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MOST = 2**63


class _Named:
    """A class or a function of an index, by its full name; with `args` what was made by it."""

    def __init__(self, name: str, args: Any = None) -> None:
        self.name, self.args = name, args
        self.state: Any = None


def read_index(path: Path) -> Metadata:
    """Return the index in a file, a ValueError if it is none that torch writes.

    What it says about tensors and files is for the caller to check.
    """
    try:
        return _metadata(_followed(path.read_bytes()))
    except (IndexError, KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise ValueError(f"it is no index of tensors ({error})") from None


def _followed(data: bytes) -> Any:
    """Return what a pickle describes, of plain values and `_Named`; other opcodes are refused."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []

    def since_mark() -> list[Any]:
        start = marks.pop()
        taken = stack[start:]
        del stack[start:]
        return taken

    arg: Any
    for opcode, arg, _ in pickletools.genops(data):
        name = opcode.name
        if name in _VALUES:
            stack.append(arg)
        elif name in _NEW:
            stack.append(_NEW[name]())
        elif name == "MEMOIZE":
            memo.append(stack[-1])
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[arg])
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name in _LENGTHS:
            stack[-_LENGTHS[name] :] = [tuple(stack[-_LENGTHS[name] :])]
        elif name in ("APPEND", "APPENDS"):
            items = since_mark() if name == "APPENDS" else [stack.pop()]
            _of(list, stack[-1]).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            pairs = since_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            _of(dict, stack[-1]).update(zip(pairs[::2], pairs[1::2], strict=True))
        elif name == "STACK_GLOBAL":
            what, module = _of(str, stack.pop()), _of(str, stack.pop())
            stack.append(_Named(f"{module}.{what}"))
        elif name in ("NEWOBJ", "REDUCE"):
            args, made = _of(tuple, stack.pop()), _of(_Named, stack.pop())
            if made.args is not None:
                raise ValueError("an object stands where a class belongs")
            stack.append(_Named(made.name, args))
        elif name == "BUILD":
            state, made = stack.pop(), _of(_Named, stack[-1])
            if made.args is None or made.state is not None:
                raise ValueError("the state of no new object")
            made.state = state
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"opcode {name}")
    raise ValueError("it has no end")


def _of(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} stands where a {kind.__name__} belongs")
    return value


def _fields(value: Any, name: str) -> dict[str, Any]:
    """Return the fields of an object of this class."""
    if _of(_Named, value).name != f"{_HERE}.{name}" or value.args != ():
        raise ValueError(f"{value.name} stands where {name} belongs")
    return _of(dict, value.state)  # type: ignore[no-any-return]


def _metadata(value: Any) -> Metadata:
    fields = _fields(value, "metadata.Metadata")
    return Metadata(
        state_dict_metadata={
            _of(str, name): _tensor(one) for name, one in fields["state_dict_metadata"].items()
        },
        planner_data={_of(str, name): _path(one) for name, one in fields["planner_data"].items()},
        storage_data={_place(key): _file(one) for key, one in fields["storage_data"].items()},
        version=_of(str, fields["version"]) if "version" in fields else None,
    )


def _tensor(value: Any) -> TensorStorageMetadata:
    fields = _fields(value, "metadata.TensorStorageMetadata")
    properties = _of(_Named, fields["properties"])
    if properties.name != f"{_HERE}.metadata.TensorProperties":
        raise ValueError(f"{properties.name} stands where TensorProperties belongs")
    module, _, name = _of(_Named, _of(tuple, properties.state)[0]).name.rpartition(".")
    dtype = vars(torch).get(name) if module == "torch" else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{module}.{name} is no dtype")
    chunks = [_fields(one, "metadata.ChunkStorageMetadata") for one in _of(list, fields["chunks"])]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=_size(fields["size"]),
        chunks=[
            ChunkStorageMetadata(offsets=_size(one["offsets"]), sizes=_size(one["sizes"]))
            for one in chunks
        ],
    )


def _place(value: Any) -> MetadataIndex:
    fields = _fields(value, "metadata.MetadataIndex")
    offset, index = fields["offset"], fields["index"]
    return MetadataIndex(
        _of(str, fields["fqn"]),
        None if offset is None else _size(offset),
        None if index is None else _number(index),
    )


def _file(value: Any) -> _StorageInfo:
    fields = _fields(value, "filesystem._StorageInfo")
    if fields.get("transform_descriptors") is not None:
        raise ValueError("a file is transformed")
    return _StorageInfo(
        _of(str, fields["relative_path"]), _number(fields["offset"]), _number(fields["length"])
    )


def _path(value: Any) -> tuple[str | int, ...]:
    """Return where a tensor stands in a nested state."""
    path: tuple[Any, ...] = _of(tuple, value)
    if not all(type(one) in (str, int) for one in path):
        raise TypeError("a path in the state has other parts than names and numbers")
    return path


def _size(value: Any) -> torch.Size:
    if _of(_Named, value).name != "torch.Size":
        raise ValueError(f"{value.name} stands where a size belongs")
    (lengths,) = _of(tuple, value.args)
    return torch.Size(_number(one) for one in _of(tuple, lengths))


def _number(value: Any) -> int:
    if not 0 <= _of(int, value) < _MOST:
        raise ValueError(f"{value} is no size")
    return int(value)
