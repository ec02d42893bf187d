"""Lets optimizers follow parameters that sharding has replaced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from headway.errors import UsageError

_SUCCESSOR = "_headway_successor"  # of a parameter: the one that a prepared model has in its place


def succeeds(old: torch.Tensor, new: torch.Tensor) -> None:
    """Note that `new` has taken the place of `old`, and free what that one held."""
    if old is new or hasattr(old, _SUCCESSOR):
        return  # the second place of a tied parameter
    new.__dict__.update(old.__dict__)
    setattr(old, _SUCCESSOR, new)
    old.grad = None
    old.data = old.data.new_empty(0)


_NEEDS = {  # of optimizers that do not work with shards
    "Adafactor": "needs the rows and columns of whole parameters",  # torch's and others'
    "Rprop": "writes to elements that a mask selects, which torch cannot do in shards",
}


def follow(optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer` update the successors of its parameters, with its state so far.

    Raises:
        UsageError: a parameter is in no prepared model, or the optimizer cannot update shards.
    """
    kind = type(optimizer).__name__
    if kind in _NEEDS:
        raise UsageError(
            f"{kind} cannot train a sharded model: it {_NEEDS[kind]}",
            where="the script's prepare(...)",
            fix="use AdamW, or another optimizer that updates each element by itself",
        )
    for group in optimizer.param_groups:
        for old in group["params"]:
            if not isinstance(getattr(old, _SUCCESSOR, old), DTensor):
                raise UsageError(
                    f"{kind} has a parameter of shape {list(old.shape)} that belongs to no"
                    " prepared model: its steps would change nothing that is trained",
                    where="the script's prepare(...)",
                    fix="give prepare() the model together with the optimizer, or before it",
                )
    for group in optimizer.param_groups:
        # in place: LBFGS and others keep the list
        group["params"][:] = [_followed(one, optimizer.state) for one in group["params"]]


def _followed(old: torch.Tensor, state: Any) -> torch.Tensor:
    new: torch.Tensor | None = getattr(old, _SUCCESSOR, None)
    if new is None:
        return old
    if old in state:
        state[new] = {name: sharded_as(new, one) for name, one in state.pop(old).items()}
    return new


def sharded_as(parameter: torch.Tensor, value: Any) -> Any:
    """Return `value` sharded as `parameter`, if it is a whole tensor of the same shape.

    Every rank takes its part of its own `value`; nothing is sent.
    """
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor) or value.shape != parameter.shape:
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)


def require_sharded(parameters: Iterable[torch.Tensor], method: str) -> None:
    """Raise UsageError unless all of these are parameters of prepared models."""
    tensors = list(parameters)
    where = f"the script's {method}(...)"
    if any(hasattr(one, _SUCCESSOR) for one in tensors):
        raise UsageError(
            f"{method}() got parameters from before prepare(), which have been replaced by sharded"
            " ones",
            where=where,
            fix=f"pass those of the prepared model: {method}(model.parameters(), ...)",
        )
    if len({isinstance(one, DTensor) for one in tensors}) > 1:
        raise UsageError(
            f"{method}() got sharded parameters together with parameters of a model that is not"
            " prepared; torch cannot clip both at once",
            where=where,
            fix="prepare that model too, or call it once for each of the two",
        )
