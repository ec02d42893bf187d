"""Outputs of a half-precision forward pass, converted to fp32."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch

from headway.collectives import for_each_tensor

_HALF = (torch.float16, torch.bfloat16)


def convert_to_fp32(tensor: Any) -> Any:
    """Return nested `tensor` with its tensors of float16 and bfloat16 in float32.

    Args:
        tensor: tensors of any shape and dtype, alone or nested in lists, tuples and mappings; other
            objects are kept as they are.
    """
    return for_each_tensor(_to_fp32, tensor)


class ConvertOutputsToFp32:
    """A forward function whose half-precision outputs are in fp32.

    It can be pickled and copied where `model_forward` can.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        update_wrapper(self, model_forward)
        self.__wrapped__ = model_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.__wrapped__(*args, **kwargs))


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> ConvertOutputsToFp32:
    """Return `model_forward` with its half-precision outputs in fp32."""
    return ConvertOutputsToFp32(model_forward)


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor
