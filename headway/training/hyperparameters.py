"""The hyperparameters of optimizers and schedulers, and those that a checkpoint replaces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

Groups = Sequence[Mapping[str, Any]]
"""Names and values of each parameter group, or of a scheduler and the schedulers in it."""

_PLAIN = (bool, int, float, str, type(None))
_PROGRESS = ("last_epoch", "best", "base_lrs", "last_lr")  # or it follows from the optimizer's
_WORDS = {"lr": "learning rate"}


def of_optimizer(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups = [_plain_items(group) for group in optimizer.param_groups]
    for group in groups:
        if "initial_lr" in group:  # then `lr` is where a schedule stands
            group["lr"] = group.pop("initial_lr")
    return groups


def of_scheduler(scheduler: Any) -> list[dict[str, Any]]:
    state: dict[str, Any] = getattr(scheduler, "state_dict", dict)()
    items = {name: value for name, value in _plain_items(state).items() if name[0] != "_"}
    inner = [group for one in getattr(scheduler, "_schedulers", ()) for group in of_scheduler(one)]
    return [{name: items[name] for name in items if name not in _PROGRESS}, *inner]


def _plain_items(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a line can show: numbers, texts and sequences of them."""
    items = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        parts = value if isinstance(value, (list, tuple)) else [value]
        if all(isinstance(part, _PLAIN) for part in parts):
            items[name] = value
    return items


def replaced(given: Groups, before: Groups, loaded: Groups, way: str) -> Iterator[str]:
    """Yield a line for each hyperparameter that the script has given and a checkpoint replaces.

    `before` was given in the run that saved it: what that script itself has changed since, such as
    a learning rate that it lowers, is no difference. `way` is code that sets one.
    """
    lines = [
        f"note: {_WORDS.get(name, name)} {new[name]} of the checkpoint replaces {value} of the"
        f" script; to use the script's, set it afterwards: {way.format(name=name, value=value)}"
        for group, old, new in zip(given, before, loaded, strict=False)
        for name, value in group.items()
        if value not in (old.get(name, value), new.get(name, value))
    ]
    yield from dict.fromkeys(lines)
