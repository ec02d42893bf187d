"""Which modules of a model are its units: sharded and gathered together, or checkpointed each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from headway.errors import UsageError, did_you_mean

Module = torch.nn.Module
_LISTS = (torch.nn.ModuleList, torch.nn.Sequential)
_NOT_CALLED = (torch.nn.ModuleList, torch.nn.ModuleDict)  # forward() is that of their members


def units_of(model: Module, wrap: str = "auto") -> list[list[Module]]:
    """Return the units below `model`, inner ones first; what is in none belongs to the model.

    A unit is one module as a rule. Modules that share a parameter are one unit together; those
    that share one with the rest of the model are no unit.

    Args:
        wrap: `auto` for the blocks of one class that a ModuleList or Sequential repeats; the names
            of classes, with commas; or the smallest number of parameters of a unit.

    Raises:
        UsageError: the model has no module of a class that `wrap` names.
    """
    if wrap == "auto":
        chosen = list(_repeated(model))
    elif wrap.isdecimal():
        chosen = _of_size(model, int(wrap))
    else:
        chosen = _of_classes(model, wrap.split(","))
    return _without_ties(model, _inner_first(model, chosen))


def _inner_first(model: Module, chosen: Sequence[Module]) -> list[Module]:
    wanted = {*chosen} - {model}
    return [one for one in reversed([*model.modules()]) if one in wanted]


def _repeated(model: Module) -> Iterator[Module]:
    """Yield the outermost modules with parameters whose class is repeated in their list."""
    members = list(model.children())
    counts = Counter(type(one) for one in members) if isinstance(model, _LISTS) else Counter()
    for one in members:
        is_block = counts[type(one)] > 1 and any(True for _ in one.parameters())
        if is_block and not isinstance(one, (*_LISTS, *_NOT_CALLED)):
            yield one
            continue
        inner = list(_repeated(one))
        has_blocks = any(True for block in inner for _ in block.children())  # else single layers
        if is_block and not has_blocks and not isinstance(one, _NOT_CALLED):
            yield one
        else:
            yield from inner


def _of_classes(model: Module, names: Sequence[str]) -> list[Module]:
    found = {type(one).__name__ for one in model.modules()}
    for name in names:
        if name not in found:
            guess = did_you_mean(name, sorted(found))
            raise UsageError(
                f"wrap is {','.join(names)!r}, but {type(model).__name__} contains no module of"
                f" class {name!r}",
                where="the setting wrap",
                fix=f"did you mean {guess!r}?"
                if guess
                else "name a class that print(model) shows, or leave wrap at auto",
            )
    return [
        one
        for one in model.modules()
        if type(one).__name__ in names and not isinstance(one, _NOT_CALLED)
    ]


def _of_size(model: Module, minimum: int) -> list[Module]:
    """Return the innermost modules that have this many parameters beside those of other units."""
    chosen: list[Module] = []

    def visit(module: Module) -> int:
        """Return the number of parameters in `module` that are in no unit."""
        own = sum(one.numel() for one in module.parameters(recurse=False))
        count = own + sum(visit(child) for child in module.children())
        if count < minimum or isinstance(module, _NOT_CALLED):
            return count
        chosen.append(module)
        return 0

    visit(model)
    return chosen


def _without_ties(model: Module, units: list[Module]) -> list[list[Module]]:
    """Return the units, of which those that share parameters are joined or left out."""
    groups = [[one] for one in units]
    while True:
        tie = next(_ties(model, groups), None)
        if tie is None:
            return groups
        if model in tie or _is_nested(tie):
            outermost = [one for one in tie if not _is_within(one, [*tie - {one}])]
            dropped = tie - {*outermost} if model not in tie else tie
            groups = [left for one in groups if (left := [m for m in one if m not in dropped])]
        else:
            joined = [one for one in groups if tie & {*one}]
            at = groups.index(joined[-1])  # inner units stay before outer ones
            groups[at] = [member for one in joined for member in one]
            groups = [one for one in groups if one not in joined]


def _ties(model: Module, groups: Sequence[Sequence[Module]]) -> Iterator[set[Module]]:
    """Yield the units that share a parameter, unless they are one group; the model is one, too."""
    group_of = {member: number for number, one in enumerate(groups) for member in one}
    homes: dict[torch.Tensor, set[Module]] = {}

    def visit(module: Module, home: Module) -> None:
        home = module if module in group_of else home
        for parameter in module.parameters(recurse=False):
            homes.setdefault(parameter, set()).add(home)
        for child in module.children():
            visit(child, home)

    visit(model, model)
    for tie in homes.values():
        if len({group_of.get(one) for one in tie}) > 1:
            yield tie


def _is_nested(modules: set[Module]) -> bool:
    return any(_is_within(one, [*modules - {one}]) for one in modules)


def _is_within(module: Module, others: Sequence[Module]) -> bool:
    return any(module is one for other in others for one in other.modules())


def checkpoint_activations(blocks: Iterable[torch.nn.Module]) -> None:
    """Let each block keep only its inputs until the backward pass; names of weights stay."""
    for block in blocks:
        if not isinstance(block.forward, _CheckpointedForward):
            block.forward = _CheckpointedForward(block.forward)


class _CheckpointedForward:
    """A block's forward under `torch.utils.checkpoint`, where gradients are wanted.

    An object and no closure, so that a copied or unpickled block calls its own forward.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.__wrapped__ = forward  # what inspect.signature() looks at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        return checkpoint(self.__wrapped__, *args, use_reentrant=False, **kwargs)
