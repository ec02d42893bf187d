"""What a model is wrapped in (compiled, distributed, from peft), and the model inside."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from headway.precision.precision import restore_forward
from headway.strategies.compilation import is_compiled_in_place, uncompiled


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Return whether `module` is what torch.compile() returned.

    Examples:
        >>> import torch
        >>> from headway.utils import is_compiled_module
        >>> is_compiled_module(torch.nn.Linear(2, 1))
        False
    """
    # which is imported by the first torch.compile(), and takes seconds
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def has_compiled_regions(module: torch.nn.Module) -> bool:
    """Return whether `module` or a submodule is compiled, by torch.compile() or in place.

    Examples:
        >>> import torch
        >>> from headway.utils import has_compiled_regions
        >>> has_compiled_regions(torch.nn.Sequential(torch.nn.Linear(2, 1)))
        False
    """
    return any(is_compiled_module(one) or is_compiled_in_place(one) for one in module.modules())


def is_peft_model(model: torch.nn.Module) -> bool:
    """Return whether `model` is one of peft's, or is wrapped around one.

    Examples:
        >>> import torch
        >>> from headway.utils import is_peft_model
        >>> is_peft_model(torch.nn.Linear(2, 1))
        False
    """
    peft = sys.modules.get("peft")  # without it nobody has made one
    return peft is not None and isinstance(
        uncompiled(extract_model_from_parallel(model)), peft.PeftModel
    )


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Return whether a parameter of `model` is sharded as a DTensor.

    Examples:
        >>> import torch
        >>> from headway.utils import model_has_dtensor
        >>> model_has_dtensor(torch.nn.Linear(2, 1))
        False
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(one, module.DTensor) for one in model.parameters())


def extract_model_from_parallel(
    model: torch.nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> torch.nn.Module:
    """Return the model inside DistributedDataParallel or DataParallel.

    Args:
        keep_fp32_wrapper: let the model go on computing under autocast, with outputs in fp32.
        keep_torch_compile: return a model that was compiled as such.
        recursive: unwrap everything that has an attribute `module`, and the same for submodules.

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
