"""Compiles whole models or their repeated blocks, and unwraps compiled and wrapped models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from headway.distributed.handler import KwargsHandler, TextEnum
from headway.distributed.nested import is_instance_of
from headway.errors import Code, UsageError, suggestion
from headway.precision.precision import restore_forward
from headway.strategies.units import units_of


class DynamoBackend(str, TextEnum):
    """The usual backends of `torch.compile`; pass other registered backends by name.

    Examples:
        >>> from headway.utils import DynamoBackend, TorchDynamoPlugin
        >>> TorchDynamoPlugin(backend="eager").backend is DynamoBackend.EAGER
        True
    """

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    TVM = "TVM"


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments for `torch.compile`, which compiles prepared models.

    Args:
        backend: a `DynamoBackend`, the name of a registered backend (case-insensitive for the
            usual ones), or a function; None and "no" disable compilation.
        mode: "default", "reduce-overhead" or "max-autotune"; None is "default".
        fullgraph: whether a graph break is an error; None is False.
        dynamic: whether to compile for dynamic shapes; None detects dynamic shapes automatically.
        options: options for the backend, instead of a mode.
        disable: turn `torch.compile` into a no-op.
        use_regional_compilation: compile the model's repeated blocks, such as transformer layers,
            instead of the whole model; equal blocks share compiled code.

    Examples:
        >>> from headway.utils import TorchDynamoPlugin
        >>> TorchDynamoPlugin(backend="inductor", dynamic=True).to_kwargs()
        {'backend': 'inductor', 'dynamic': True}
        >>> TorchDynamoPlugin(backend="inductor").to_dict()["backend"]
        'inductor'
    """

    backend: DynamoBackend | str | Callable[..., Any] | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: dict[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend is None:
            self.backend = DynamoBackend.NO
        elif isinstance(self.backend, str) and self.backend.upper() in set(DynamoBackend):
            self.backend = DynamoBackend(self.backend.upper())

    @property
    def compiles(self) -> bool:
        """Whether models are compiled."""
        return self.backend is not DynamoBackend.NO

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields, with torch's name for the backend."""
        found = super().to_dict()
        if isinstance(self.backend, DynamoBackend):
            found["backend"] = self.backend.value.lower()
        return found

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments for `torch.compile` that differ from their defaults."""
        found = super().to_kwargs()
        found.pop("use_regional_compilation", None)
        return found


def compiled(model: torch.nn.Module, plugin: TorchDynamoPlugin) -> torch.nn.Module:
    """Compile `model` as configured by `plugin`, unless it is already compiled.

    Blocks are compiled in place, so that parameter names do not change. A model without repeated
    blocks is compiled as a whole.
    """
    if not plugin.compiles or uncompiled(model) is not model:
        return model
    if plugin.use_regional_compilation and compile_blocks(units_of(model), plugin):
        return model
    return cast(torch.nn.Module, torch.compile(model, **_arguments(plugin)))


def compile_blocks(blocks: Sequence[torch.nn.Module], plugin: TorchDynamoPlugin) -> bool:
    """Compile blocks in place, with shared code for equal blocks; return False if there are none.

    `Module.compile()` has no effect on torch's own classes, such as Linear, because dynamo skips
    their frames. Instead, this function sets the private attribute that `compile()` would set.
    """
    if not plugin.compiles or not blocks:
        return False
    call = torch.compile(_call, **_arguments(plugin))
    for block in blocks:
        block._compiled_call_impl = partial(call, block)
    return True


def _call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the original model if `torch.compile` returned `model`; otherwise return `model`."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, torch.nn.Module) else model


def _arguments(plugin: TorchDynamoPlugin) -> dict[str, Any]:
    """Return the arguments for `torch.compile`; raise UsageError if the backend is unknown."""
    arguments = plugin.to_kwargs()
    backend, known = arguments["backend"], torch.compiler.list_backends(exclude_tags=())
    if isinstance(backend, str) and backend not in known:
        raise UsageError(
            f"unknown torch.compile backend {backend!r}{suggestion(backend, known)}",
            where="the script's dynamo_backend or TorchDynamoPlugin(...)",
            fix=f"pass one of {', '.join(known)}",
            code=Code.BAD_ARGUMENT,
        )
    return arguments


# ------------------------------------------------------------------ unwrapping


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Return whether `module` was returned by torch.compile().

    Examples:
        >>> import torch
        >>> from headway.utils import is_compiled_module
        >>> is_compiled_module(torch.nn.Linear(2, 1))
        False
    """
    return uncompiled(module) is not module


def has_compiled_regions(module: torch.nn.Module) -> bool:
    """Return whether `module` or a submodule is compiled, by torch.compile() or in place.

    Examples:
        >>> import torch
        >>> from headway.utils import has_compiled_regions
        >>> has_compiled_regions(torch.nn.Sequential(torch.nn.Linear(2, 1)))
        False
    """
    in_place = (getattr(part, "_compiled_call_impl", None) for part in module.modules())
    return any(in_place) or any(map(is_compiled_module, module.modules()))


def is_peft_model(model: torch.nn.Module) -> bool:
    """Return whether `model` is a peft model, or wraps one.

    Examples:
        >>> import torch
        >>> from headway.utils import is_peft_model
        >>> is_peft_model(torch.nn.Linear(2, 1))
        False
    """
    return is_instance_of(uncompiled(extract_model_from_parallel(model)), "peft", "PeftModel")


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Return whether a parameter of `model` is sharded as a DTensor.

    Examples:
        >>> import torch
        >>> from headway.utils import model_has_dtensor
        >>> model_has_dtensor(torch.nn.Linear(2, 1))
        False
    """
    return any(is_instance_of(p, "torch.distributed.tensor", "DTensor") for p in model.parameters())


def extract_model_from_parallel(
    model: torch.nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> torch.nn.Module:
    """Return the model inside DistributedDataParallel or DataParallel.

    Args:
        keep_fp32_wrapper: keep the wrapper that runs the forward pass under autocast and converts
            its outputs to fp32.
        keep_torch_compile: keep the torch.compile wrapper.
        recursive: unwrap every module and submodule that has an attribute `module`.

    Examples:
        >>> import torch
        >>> from headway.utils import extract_model_from_parallel
        >>> extract_model_from_parallel(torch.nn.DataParallel(torch.nn.Linear(2, 1)))
        Linear(in_features=2, out_features=1, bias=True)
    """
    outer: Any = model
    model = uncompiled(model)
    while isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model.module
    if recursive:
        model = _unwrap_all(model)
    if not keep_fp32_wrapper:
        restore_forward(uncompiled(model))
        restore_forward(model)
    if not keep_torch_compile:
        return uncompiled(model)
    if is_compiled_module(outer) and outer._orig_mod is not model:
        outer = type(outer)(model, outer.dynamo_ctx)
    return cast(torch.nn.Module, outer) if is_compiled_module(outer) else model


def _unwrap_all(model: torch.nn.Module) -> torch.nn.Module:
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    for name, child in model.named_children():
        setattr(model, name, _unwrap_all(child))
    return model
