"""Outputs of a half-precision forward pass, converted to fp32."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch

from headway.distributed.nested import for_each_tensor

_HALF = (torch.float16, torch.bfloat16)


def convert_to_fp32(tensor: Any) -> Any:
    """Return nested `tensor` with its tensors of float16 and bfloat16 in float32.

    Args:
        tensor: tensors of any shape and dtype, alone or nested in lists, tuples and mappings; other
            objects are kept as they are.

    Examples:
        >>> import torch
        >>> from headway.utils import convert_to_fp32
        >>> convert_to_fp32([torch.ones(2, dtype=torch.bfloat16), "a text"])
        [tensor([1., 1.]), 'a text']
    """
    return for_each_tensor(_to_fp32, tensor)


class ConvertOutputsToFp32:
    """A forward function whose half-precision outputs are in fp32.

    It can be pickled and copied where `model_forward` can.

    Args:
        model_forward: any function; what it returns goes through `convert_to_fp32`.

    Examples:
        >>> import torch
        >>> from headway.utils import ConvertOutputsToFp32
        >>> ConvertOutputsToFp32(torch.nn.Linear(2, 1).bfloat16())(
        ...     torch.ones(3, 2, dtype=torch.bfloat16)
        ... ).dtype
        torch.float32
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        update_wrapper(self, model_forward)
        self.__wrapped__ = model_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.__wrapped__(*args, **kwargs))


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> ConvertOutputsToFp32:
    """Return `model_forward` with its half-precision outputs in fp32.

    Examples:
        >>> import torch
        >>> from headway.utils import convert_outputs_to_fp32
        >>> model = torch.nn.Linear(2, 1).half()
        >>> model.forward = convert_outputs_to_fp32(model.forward)
        >>> model(torch.ones(3, 2, dtype=torch.half)).dtype
        torch.float32
    """
    return ConvertOutputsToFp32(model_forward)


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor
