"""Mixed precision with bfloat16: autocast, and weights in fp32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from headway.plugins.handlers import AutocastKwargs
from headway.precision.fp32_outputs import ConvertOutputsToFp32, convert_to_fp32
from headway.precision.precision import Precision


class Bf16(Precision):
    """Forward passes under autocast to bfloat16; weights and gradients stay in fp32."""

    name = "bf16"
    dtype = torch.bfloat16
    uses_autocast = True

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        if not self.uses_autocast:
            return nullcontext()
        return torch.autocast(*self._autocast_arguments(handler or self._settings.autocast))

    def prepare_model(self, model: torch.nn.Module) -> torch.nn.Module:
        if self.uses_autocast and not isinstance(model.forward, _AutocastForward):
            arguments = self._autocast_arguments(self._settings.autocast)
            model.forward = _AutocastForward(model.forward, arguments)
        return model

    def _autocast_arguments(self, handler: AutocastKwargs) -> _AutocastArguments:
        return self._device.type, self.dtype, handler.enabled, handler.cache_enabled


_AutocastArguments = tuple[str, torch.dtype, bool, bool | None]


class _AutocastForward:
    """A model's forward under autocast, its half-precision outputs in fp32.

    An object and no closure, so that a copied or unpickled model calls its own forward.
    """

    def __init__(self, forward: Callable[..., Any], arguments: _AutocastArguments) -> None:
        self.__wrapped__ = forward  # what inspect.signature() looks at
        self._arguments = arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(*self._arguments):
            outputs = self.__wrapped__(*args, **kwargs)
        return convert_to_fp32(outputs)


def restore_forward(model: torch.nn.Module) -> None:
    """Take back what `prepare_model` or `convert_outputs_to_fp32` did to `model`."""
    while isinstance(model.forward, (_AutocastForward, ConvertOutputsToFp32)):
        model.forward = model.forward.__wrapped__
