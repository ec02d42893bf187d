"""Mixed precision with bfloat16: autocast, and weights in fp32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from headway.precision.fp32_outputs import ConvertOutputsToFp32, convert_to_fp32
from headway.precision.precision import Precision


class Bf16(Precision):
    """Forward passes under autocast to bfloat16; weights and gradients stay in fp32."""

    name = "bf16"
    dtype = torch.bfloat16

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, dtype=self.dtype)

    def prepare_model(self, model: torch.nn.Module) -> torch.nn.Module:
        if not isinstance(model.forward, _AutocastForward):
            model.forward = _AutocastForward(model.forward, self._device.type, self.dtype)
        return model


class _AutocastForward:
    """A model's forward under autocast, its half-precision outputs in fp32.

    An object and no closure, so that a copied or unpickled model calls its own forward.
    """

    def __init__(self, forward: Callable[..., Any], device_type: str, dtype: torch.dtype) -> None:
        self.__wrapped__ = forward  # what inspect.signature() looks at
        self._device_type = device_type
        self._dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device_type, dtype=self._dtype):
            outputs = self.__wrapped__(*args, **kwargs)
        return convert_to_fp32(outputs)


def restore_forward(model: torch.nn.Module) -> None:
    """Take back what `prepare_model` or `convert_outputs_to_fp32` did to `model`."""
    while isinstance(model.forward, (_AutocastForward, ConvertOutputsToFp32)):
        model.forward = model.forward.__wrapped__
