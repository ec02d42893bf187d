"""Checks that all ranks read the same stream of samples; only then can they share it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch

from headway.distributed.meeting import meet
from headway.errors import UsageError

VALUES = 64  # of each tensor that are compared
_END = "end"  # in place of a mark


def mark(samples: Any) -> int:
    """Return a number that is the same for the same samples in every process.

    Not from pickle, whose output for a tensor or a set differs between processes. Objects other
    than numbers, text, arrays and tensors count by their type only.
    """
    return crc32(repr(_values(samples)).encode(errors="backslashreplace"))


def require_one_stream(mark: int | None) -> None:
    """Compare the marks of all ranks' streams; to be called by every rank for each round.

    Ranks have to learn in each round that none has come to its end before the others, so to send a
    mark along costs no further message.

    Args:
        mark: that of samples that every rank has read; None at the end of the stream.

    Raises:
        UsageError: on all ranks, if they differ.
    """
    marks = meet("a loop over a prepared DataLoader", _END if mark is None else str(mark))
    if marks is None:
        return
    what = "lengths" if _END in marks else "samples"
    raise UsageError(
        f"the ranks' streams (IterableDataset) give different {what}, so they cannot be shared out",
        where="the loop over a prepared DataLoader",
        fix="seed the stream alike on all ranks, as with set_seed(...); or, if it picks its samples"
        " by rank itself, leave its loader out of prepare()",
    )


def _values(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        is_dense = data.layout == torch.strided
        return tuple(data.shape), data.flatten()[:VALUES].tolist() if is_dense else None
    if isinstance(data, Mapping):
        return [(_values(key), _values(value)) for key, value in data.items()]
    if isinstance(data, (list, tuple)):
        return [_values(one) for one in data]
    if data is None or isinstance(data, (str, bytes, int, float, complex)):
        return data
    has_objects = getattr(getattr(data, "dtype", None), "hasobject", False)
    if callable(getattr(data, "tobytes", None)) and not has_objects:  # numpy's arrays, PIL's images
        return crc32(data.tobytes())
    return type(data).__name__
