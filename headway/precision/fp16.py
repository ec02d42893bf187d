"""Mixed precision with float16: autocast, and a loss scale that adapts to overflows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from headway.errors import UsageError
from headway.precision.bf16 import Bf16
from headway.precision.precision import DEFAULTS, PrecisionSettings


class Fp16(Bf16):
    """Forward passes under autocast to float16, with a loss scale that adapts to overflows.

    The scale changes at the first backward pass after a step, so that several optimizers may step
    on the gradients of one backward pass.
    """

    name = "fp16"
    dtype = torch.float16

    scaler: torch.amp.GradScaler

    def __init__(self, device: torch.device, settings: PrecisionSettings = DEFAULTS) -> None:
        super().__init__(device, settings)
        self._new_scaler = partial(torch.amp.GradScaler, device.type, **settings.scaler.to_dict())
        self.scaler = self._new_scaler()
        self._unscaled: list[Optimizer] = []
        self._has_stepped = False

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        if self._has_stepped:
            self._adapt_scale()
        super().backward(self.scaler.scale(loss), **kwargs)

    def loss_scale(self) -> float:
        return self.scaler.get_scale()

    def unscale(self, optimizers: Iterable[Optimizer], tensors: Iterable[torch.Tensor]) -> None:
        wanted = set(map(id, tensors))
        for optimizer in optimizers:
            owned = {id(one) for group in optimizer.param_groups for one in group["params"]}
            if optimizer not in self._unscaled and owned & wanted:
                self.scaler.unscale_(optimizer)
                self._unscaled.append(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None) -> bool:
        if closure is not None:
            raise UsageError(
                "optimizer.step() got a closure, which fp16's loss scale cannot work with",
                where="mixed_precision 'fp16'",
                fix="use mixed_precision bf16, or an optimizer without closure",
            )
        steps: list[bool] = []

        def note_step(optimizer: Optimizer, *_: Any) -> None:
            # fused optimizers are called in any case, and skip the step themselves on found_inf
            steps.append(not bool(getattr(optimizer, "found_inf", False)))

        hook = optimizer.register_step_pre_hook(note_step)
        try:
            self.scaler.step(optimizer)
        finally:
            hook.remove()
        self._has_stepped = True
        return not any(steps)

    def gradients_dropped(self, optimizer: Optimizer) -> None:
        if optimizer in self._unscaled:
            self._adapt_scale()

    def state_dict(self) -> dict[str, Any]:
        if self._has_stepped:  # the next backward pass would begin so
            self._adapt_scale()
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # in place, as scripts hold it; without what it knows of gradients that are gone
        vars(self.scaler).update(vars(self._new_scaler()))
        self.scaler.load_state_dict(state)
        self._unscaled.clear()
        self._has_stepped = False

    def _adapt_scale(self) -> None:
        self.scaler.update()
        self._unscaled.clear()
        self._has_stepped = False
