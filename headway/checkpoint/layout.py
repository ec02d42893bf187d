"""What the state of a training is made of: what no save writes is refused before anything changes.

What an object of the script or of torch remembers is for its own `load_state_dict` to judge.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headway.checkpoint.manifest import take_another
from headway.contract.records import shown
from headway.distributed.rng import are_generator_states

Layout = Any
"""A type; a function that says whether a value fits; None; a list of the layout that each part of a
list has; a dict with those that are in a dict, where "NAME?" may be missing; or a tuple of layouts,
one of which fits."""

_LONGEST = 60  # characters of a value in a message
_MOST = 2**63


def _any(_: Any) -> bool:
    return True


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _two_counts(value: Any) -> bool:
    return type(value) is list and [*map(_count, value)] == [True, True]


def _left(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and _two_counts(value[0]) and _count(value[1])


def _two_tensors(value: Any) -> bool:
    return type(value) is tuple and [*map(_tensor, value)] == [True, True]


def _own_buffers(value: Any) -> bool:
    """Return whether a value is what one model has of its own, and whether it gets rank 0's."""
    if type(value) is not tuple or len(value) != 2:
        return False
    return fits(value[0], [(_tensor, None)]) and type(value[1]) is bool


def _named(value: Any) -> bool:
    """Return whether a value is a dict of names."""
    return type(value) is dict and all(type(key) is str for key in value)


def _generator(value: Any) -> bool:
    """Return whether a value is the state of a torch.Generator, as far as a CPU can tell."""
    return _tensor(value) and value.dtype is torch.uint8 and value.ndim == 1


def _numbers(value: Any) -> bool:
    return _named(value) and all(type(one) in (int, float) for one in value.values())


_POSITION = {
    "following": int,
    "epochs?": int,
    "size": _count,
    "total": _count,
    "seed": (int, None),
    "generators": [_generator],
    "samples": _count,
    "has_trained": bool,
    "has_lasting_workers": bool,
    "is_looked_at?": bool,
    "keeps_looks?": bool,
    "left?": (_left, None),
    "is_at_end?": bool,
    "order_seeds": [int],
    "pass": (
        {
            "epoch": int,
            "global": are_generator_states,
            "own": [_generator],
            "is_drawn?": bool,
            "stream": _any,
            "ahead?": (are_generator_states, None),
            "taken": _two_counts,
            "length": (_count, None),
        },
        None,
    ),
}
SHARED = {
    "models": [dict],
    "optimizers": [
        {
            "kind?": str,
            "parameters?": [[(str, None, [_count])]],
            "state": dict,
            "steps": _count,
            "skipped": bool,
        }
    ],
    "schedulers": [{"kind?": str, "state": _any, "seen_steps": _count}],
    "objects": [({"kind?": str, "state": _any}, {"kind?": str, "pickle": bytes})],
    "precision": {"name": (str, None), "state": (_numbers, None)},
    "accumulation": {"micro_batches": _count, "sync_gradients": bool, "steps?": _count},
    "loaders": ([_POSITION], None),
    "global_batch_size?": (_count, None),
}
"""Of what all ranks share."""

OWN = {
    "generators": (are_generator_states, None),
    "loaders": ([_POSITION], None),
    "tokens": (_two_tensors, None),
    "buffers?": [_own_buffers],
    "gradients?": [(_tensor, None)],
}
"""Of what a rank has of its own."""

OPTIMIZER = {
    "state": lambda value: type(value) is dict and all(map(_named, value.values())),
    "param_groups": [{"params": [int]}],
}
"""The state of an optimizer, as those of torch have it."""


def fits(value: Any, layout: Layout) -> bool:
    """Return whether a value is made like this."""
    return not _fault(value, layout, "")


def require_layout(value: Any, layout: Layout, where: Path, name: str = "the state") -> None:
    """Raise CheckpointError unless a value of a checkpoint is made like this."""
    if fault := _fault(value, layout, name):
        raise take_another(
            f"the checkpoint is damaged: {shown(fault)}, which no save writes", where
        )


def _fault(value: Any, layout: Layout, name: str) -> str:
    """Return which part of a value does not fit; empty if all do."""
    if isinstance(layout, tuple):
        faults = [_fault(value, one, name) for one in layout]
        return "" if "" in faults else max(faults, key=len)
    if isinstance(layout, list) and type(value) is list:
        parts = (_fault(one, layout[0], f"{name}.{i}") for i, one in enumerate(value))
        return next(filter(None, parts), "")
    if isinstance(layout, dict) and type(value) is dict:
        return _fault_in_dict(value, layout, name)
    if isinstance(layout, type):
        is_fit = type(value) is layout
    else:
        is_fit = value is None if layout is None else callable(layout) and layout(value)
    return "" if is_fit else f"{name} is {_described(value)}"


def _fault_in_dict(value: dict[Any, Any], layout: dict[str, Layout], name: str) -> str:
    for key, one in layout.items():
        path = f"{name}.{key.removesuffix('?')}"
        if key.removesuffix("?") in value:
            if fault := _fault(value[key.removesuffix("?")], one, path):
                return fault
        elif not key.endswith("?"):
            return f"{path} is missing"
    return ""


def _described(value: Any) -> str:
    is_short = value is None or isinstance(value, bool | int | float | str)
    return repr(value)[:_LONGEST] if is_short else f"a {type(value).__name__}"
