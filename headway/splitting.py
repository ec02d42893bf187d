"""One rank's part of a list, tensor or dict that all ranks have."""

from __future__ import annotations

import sys
from collections.abc import Sized
from typing import Any

from headway.containers import send_to_device
from headway.errors import UsageError
from headway.world import World


def part_of(inputs: Any, world: World, apply_padding: bool) -> Any:
    """Return this rank's consecutive part of `inputs`; the first ranks get one more if need be.

    Args:
        inputs: a list, tuple, tensor, numpy array or `datasets.Dataset`, or a dict of those, all of
            one length. It is not changed.
        apply_padding: repeat the last element until all parts are equally long; tensors are then
            on the device of `world`.

    Raises:
        UsageError: `inputs` is of another kind, or the lengths in it differ.
    """
    rank, size = world.ranks.rank, world.ranks.world_size
    length = _length(inputs)
    each, extra = divmod(length, size)
    start = rank * each + min(rank, extra)
    indices = list(range(start, start + each + (rank < extra)))
    if apply_padding and length:
        indices += [length - 1] * (each + (extra > 0) - len(indices))

    def part(one: Any) -> Any:
        if isinstance(one, dict):
            return {key: part(value) for key, value in one.items()}
        if isinstance(one, (list, tuple)):
            return type(one)([one[index] for index in indices])
        if _is_dataset(one):
            return one.select(indices)
        taken = one[indices]
        return send_to_device(taken, world.device) if apply_padding else taken

    return part(inputs)


def _length(inputs: Any) -> int:
    """Return the one length of all leaves."""
    if isinstance(inputs, dict):
        lengths = {_length(value) for value in inputs.values()}
        if len(lengths) > 1:
            raise UsageError(
                f"the values of a dict have different lengths: {sorted(lengths)}",
                where="the script's split_between_processes(...)",
                fix="give every key equally many values",
            )
        return lengths.pop() if lengths else 0
    is_array = hasattr(inputs, "__array__") and getattr(inputs, "ndim", 0) > 0
    if not (isinstance(inputs, (list, tuple)) or is_array or _is_dataset(inputs)):
        raise UsageError(
            f"a {type(inputs).__name__} cannot be split between processes",
            where="the script's split_between_processes(...)",
            fix="pass a list, tuple, tensor, array or datasets.Dataset, or a dict of those",
        )
    assert isinstance(inputs, Sized)
    return len(inputs)


def _is_dataset(one: Any) -> bool:
    datasets = sys.modules.get("datasets")  # a script that has one has imported it
    return datasets is not None and isinstance(one, datasets.Dataset)
