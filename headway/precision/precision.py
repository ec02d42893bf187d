"""Number formats: `Precision` is complete for fp32, others override what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from headway.plugins.handlers import AutocastKwargs, GradScalerKwargs


class PrecisionSettings(NamedTuple):
    """What is set about a precision, besides its name."""

    autocast: AutocastKwargs = AutocastKwargs()
    scaler: GradScalerKwargs = GradScalerKwargs()


DEFAULTS = PrecisionSettings()


class Precision:
    """Weights, activations and gradients in the script's own dtypes, which are fp32 as a rule.

    Attributes:
        uses_autocast: whether models that are prepared from now on compute under autocast.
        scaler: what adapts the loss scale; None where there is none.
    """

    name = "no"
    uses_autocast = False
    scaler: torch.amp.GradScaler | None = None

    def __init__(self, device: torch.device, settings: PrecisionSettings = DEFAULTS) -> None:
        self._device = device
        self._settings = settings

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the context in which a forward pass is computed.

        Args:
            handler: in place of that of the settings.
        """
        return nullcontext()

    def prepare_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make every call of `model` compute in this precision."""
        return model

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Add the gradients of `loss` to the parameters."""
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def loss_scale(self) -> float:
        """Return the factor by which gradients are scaled until `unscale`."""
        return 1.0

    def unscale(self, optimizers: Iterable[Optimizer], tensors: Iterable[torch.Tensor]) -> None:
        """Divide the gradients of the optimizers that own `tensors` by the loss scale."""

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None) -> bool:
        """Let `optimizer` step; return whether the step was skipped for an overflow."""
        if closure is None:
            optimizer.step()  # some of the scripts' own take no closure
        else:
            optimizer.step(closure)
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return what changes in training: the loss scale, where there is one."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what `state_dict` returned in a run with the same precision."""

    def gradients_dropped(self, optimizer: Optimizer) -> None:
        """Note that the gradients of `optimizer` were set to zero."""
