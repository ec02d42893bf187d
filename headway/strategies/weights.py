"""Broadcasts rank 0's weights unit by unit, and creates models on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist

from headway.distributed.collectives import broadcast_object_list, gather_object
from headway.errors import Code, UsageError

_DIRECT: dict[str, Any] = {"recurse": False, "remove_duplicate": False}


class ModuleTensor(NamedTuple):
    module: torch.nn.Module
    name: str
    tensor: torch.Tensor


def parameters_of(modules: Iterable[torch.nn.Module]) -> list[ModuleTensor]:
    """Return the modules' direct parameters, with one entry per use of a tied parameter."""
    return [ModuleTensor(m, *named) for m in modules for named in m.named_parameters(**_DIRECT)]


def buffers_of(modules: Iterable[torch.nn.Module]) -> list[ModuleTensor]:
    return [ModuleTensor(m, *named) for m in modules for named in m.named_buffers(**_DIRECT)]


def saved_buffers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """Return the owners and names of persistent buffers, such as running means.

    Relies on an undocumented name in torch: `_non_persistent_buffers_set`.
    """
    return [
        (buffer.module, buffer.name)
        for buffer in buffers_of(model.modules())
        if buffer.name not in buffer.module._non_persistent_buffers_set
    ]


class ModelWeights:
    """The parameters and buffers of a model, some of which may be on the meta device.

    Rank 0's data is broadcast. Tensors that are on the meta device on rank 0 are initialized by
    their module's `reset_parameters()` and the model's `_init_weights(module)`.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._names = {module: name for name, module in model.named_modules()}
        modules = list(self._names)
        owned = [*parameters_of(modules), *buffers_of(modules)]
        self._owners = {id(entry.tensor): self._full_name(entry) for entry in reversed(owned)}
        _require_same_everywhere([self._described(entry) for entry in owned])
        without_data = [self._full_name(entry) for entry in owned if entry.tensor.is_meta]
        self._without_data = {*broadcast_object_list([without_data])[0]}

    @torch.no_grad()
    def fill(self, modules: Sequence[torch.nn.Module]) -> None:
        """Move the modules' tensors to the device, and copy rank 0's values; a collective call."""
        owned = [*parameters_of(modules), *buffers_of(modules)]
        placed = {id(entry.tensor): self._placed(entry) for entry in owned}
        for entry in owned:
            setattr(entry.module, entry.name, placed[id(entry.tensor)])
        uninitialized = [entry for entry in owned if self._full_name(entry) in self._without_data]
        for module in dict.fromkeys(entry.module for entry in uninitialized):
            self._initialise(module)
        for entry in uninitialized:
            self._require_values(entry)
        for tensor in {id(tensor): tensor for tensor in placed.values()}.values():
            dist.broadcast(tensor.data, src=0)

    def _full_name(self, entry: ModuleTensor) -> str:
        return ".".join(filter(None, (self._names[entry.module], entry.name)))

    def _described(self, entry: ModuleTensor) -> str:
        tensor, name, owner = entry.tensor, self._full_name(entry), self._owners[id(entry.tensor)]
        tied = f" tied to {owner}" if owner != name else ""
        frozen = "" if tensor.requires_grad else " without gradient"
        return f"{name} {list(tensor.shape)} {tensor.dtype}{frozen}{tied}"

    def _placed(self, entry: ModuleTensor) -> torch.Tensor:
        tensor = entry.tensor
        if not tensor.is_meta:
            tensor.data = tensor.data.to(self._device).contiguous()
            return tensor
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        if empty.is_floating_point():
            empty.fill_(torch.nan)  # to detect uninitialized values
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

    def _require_values(self, entry: ModuleTensor) -> None:
        tensor = getattr(entry.module, entry.name)
        if not (tensor.is_floating_point() and tensor.isnan().any()):
            return
        kind = type(entry.module).__name__
        raise UsageError(
            f"{self._full_name(entry)} was created on the meta device, and {kind} does not"
            " initialize it",
            where="the script's prepare(...)",
            fix=f"add a reset_parameters() to {kind} that sets {entry.name}, or load the weights on"
            " rank 0 before prepare()",
            code=Code.MODEL_DEVICE,
        )


def _require_same_everywhere(tensors: list[str]) -> None:
    """Raise UsageError on all ranks if their tensors differ; otherwise, collectives would hang."""
    if len({*gather_object([crc32("\n".join(tensors).encode())])}) == 1:
        return
    everywhere: list[list[str]] = gather_object([tensors])
    other = next(rank for rank, facts in enumerate(everywhere) if facts != everywhere[0])
    pairs = zip_longest(everywhere[0], everywhere[other], fillvalue="no further tensor")
    ours, theirs = next((ours, two) for ours, two in pairs if ours != two)
    raise UsageError(
        f"the model differs between ranks: rank 0 has {ours}, but rank {other} has {theirs}",
        where="the script's prepare(...)",
        fix="create the same model, and freeze and tie the same parameters, on every rank; after"
        " load_state_dict(assign=True), tie them again: model.tie_weights() in transformers",
        code=Code.MODELS_DIFFER,
        is_of_all_ranks=True,
    )


@contextmanager
def parameters_without_data() -> Iterator[None]:
    """Create parameters on the meta device inside the context.

    Buffers are created as usual, because most are computed and could not be recomputed later.
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
        return tensor  # tied to a parameter that already is on the meta device
    empty = torch.nn.Parameter(tensor.detach().to("meta"), tensor.requires_grad)
    empty.__dict__.update(tensor.__dict__)
    return empty
