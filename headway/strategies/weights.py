"""Gives all ranks the weights of rank 0, for one unit of a model after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist

from headway.distributed.collectives import broadcast_object_list, gather_object
from headway.errors import UsageError


class Owned(NamedTuple):
    module: torch.nn.Module
    name: str
    tensor: torch.Tensor


def parameters_of(modules: Iterable[torch.nn.Module]) -> list[Owned]:
    """Return the modules' own parameters, each as often as it is used."""
    return [*_owned((module, module._parameters) for module in modules)]


def buffers_of(modules: Iterable[torch.nn.Module]) -> list[Owned]:
    return [*_owned((module, module._buffers) for module in modules)]


def saved_buffers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """Return the owners and names of buffers in the state dict, such as running means.

    Relies on an undocumented name of torch: `_non_persistent_buffers_set`.
    """
    return [
        (one.module, one.name)
        for one in buffers_of(model.modules())
        if one.name not in one.module._non_persistent_buffers_set
    ]


def _owned(tensors: Iterable[tuple[torch.nn.Module, Mapping[str, Any]]]) -> Iterator[Owned]:
    for module, by_name in tensors:
        for name, one in by_name.items():
            if one is not None:
                yield Owned(module, name, one)


class ModelWeights:
    """The parameters and buffers of a model, some of which may have no data (device "meta").

    Rank 0's data is sent to the other ranks. What has no data there either is initialised by
    `reset_parameters()` of the module that owns it, and `_init_weights(module)` of the model.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._names = {module: name for name, module in model.named_modules()}
        modules = list(self._names)
        owned = [*parameters_of(modules), *buffers_of(modules)]
        _require_same_everywhere([self._described(one) for one in owned])
        without_data = [self._full_name(one) for one in owned if one.tensor.is_meta]
        self._without_data = {*broadcast_object_list([without_data])[0]}

    @torch.no_grad()
    def fill(self, modules: Sequence[torch.nn.Module]) -> None:
        """Place the modules' tensors on the device, with rank 0's values; every rank calls this."""
        owned = [*parameters_of(modules), *buffers_of(modules)]
        placed = {id(one.tensor): self._placed(one) for one in owned}
        for one in owned:
            setattr(one.module, one.name, placed[id(one.tensor)])
        lacking = [one for one in owned if self._full_name(one) in self._without_data]
        for module in dict.fromkeys(one.module for one in lacking):
            self._initialise(module)
        for one in lacking:
            self._require_values(one)
        for tensor in {id(one): one for one in placed.values()}.values():
            dist.broadcast(tensor.data, src=0)

    def _full_name(self, one: Owned) -> str:
        return ".".join(filter(None, (self._names[one.module], one.name)))

    def _described(self, one: Owned) -> str:
        frozen = "" if one.tensor.requires_grad else " without gradient"
        return f"{self._full_name(one)} {list(one.tensor.shape)} {one.tensor.dtype}{frozen}"

    def _placed(self, one: Owned) -> torch.Tensor:
        tensor = one.tensor
        if not tensor.is_meta:
            tensor.data = tensor.data.to(self._device).contiguous()
            return tensor
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        if empty.is_floating_point():
            empty.fill_(torch.nan)  # to find what nothing initialises
        if not isinstance(tensor, torch.nn.Parameter):
            return empty
        placed = torch.nn.Parameter(empty, tensor.requires_grad)
        placed.__dict__.update(tensor.__dict__)
        return placed

    def _initialise(self, module: torch.nn.Module) -> None:
        for name in ("reset_parameters", "_reset_parameters"):
            reset: Any = getattr(module, name, None)
            if callable(reset):
                reset()
                break
        initialise: Any = getattr(self._model, "_init_weights", None)
        if callable(initialise):
            initialise(module)

    def _require_values(self, one: Owned) -> None:
        tensor = getattr(one.module, one.name)
        if not (tensor.is_floating_point() and tensor.isnan().any()):
            return
        kind = type(one.module).__name__
        raise UsageError(
            f"{self._full_name(one)} was made without data (device meta), and {kind} does not"
            " initialise it",
            where="the script's prepare(...)",
            fix=f"give {kind} a reset_parameters() that sets {one.name}, or load the weights on"
            " rank 0 before prepare()",
        )


def _require_same_everywhere(tensors: list[str]) -> None:
    """Raise on all ranks unless they have the same tensors; they would wait for each other."""
    if len({*gather_object([crc32("\n".join(tensors).encode())])}) == 1:
        return
    everywhere: list[list[str]] = gather_object([tensors])
    other = next(rank for rank, one in enumerate(everywhere) if one != everywhere[0])
    pairs = zip_longest(everywhere[0], everywhere[other], fillvalue="no more")
    ours, theirs = next((one, two) for one, two in pairs if one != two)
    raise UsageError(
        f"the model is not the same on all ranks: rank 0 has {ours}, and rank {other} {theirs}",
        where="the script's prepare(...)",
        fix="make the model in the same way, and freeze the same parameters, on every rank",
    )


@contextmanager
def parameters_without_data() -> Iterator[None]:
    """Make modules in the context have their parameters on the meta device.

    Buffers are made as usual: most are computed, and nothing could compute them again.
    """
    register = torch.nn.Module.register_parameter

    def register_empty(
        module: torch.nn.Module, name: str, param: torch.nn.Parameter | None
    ) -> None:
        register(module, name, None if param is None else _without_data(param))

    torch.nn.Module.register_parameter = register_empty  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def _without_data(tensor: torch.nn.Parameter) -> torch.nn.Parameter:
    if tensor.is_meta:
        return tensor  # tied to one that was made before
    empty = torch.nn.Parameter(tensor.detach().to("meta"), tensor.requires_grad)
    empty.__dict__.update(tensor.__dict__)
    return empty
