"""The Accelerator that behaves as Accelerate's where the two differ."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from headway import accelerator as native
from headway.compat.forwarding import forward
from headway.compat.scheduler import AcceleratedScheduler
from headway.optimizer import PreparedOptimizer

__getattr__, __dir__ = forward(__name__)

Tensors = torch.Tensor | Iterable[torch.Tensor]


class Accelerator(native.Accelerator):
    """`headway.Accelerator` for scripts that rely on what Accelerate does differently.

    - A schedule steps once for each rank: see `AcceleratedScheduler`.
    - A schedule whose optimizer has not been prepared follows all prepared optimizers.
    - Gradients are clipped in every micro-batch, also while they accumulate.
    - After `load_state` a loader begins its epoch anew; `skip_first_batches` goes on in it.
    """

    _skips_itself = True

    def _prepare_scheduler(self, scheduler: Any, _: torch.device | None) -> None:
        if isinstance(scheduler, LRScheduler):
            own = self._find(scheduler.optimizer)
            prepared = AcceleratedScheduler(
                scheduler,
                self._all(PreparedOptimizer) if own is None else own,
                step_with_optimizer=self.step_scheduler_with_optimizer,
                split_batches=self.split_batches,
            )
            self._prepared.append((scheduler, prepared))

    def clip_grad_norm_(
        self, parameters: Tensors, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip the gradients' norm, also while gradients accumulate, and return what it was."""
        return self._strategy.clip_grad_norm_(self._unscaled(parameters), max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensors, clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value], also while gradients accumulate."""
        torch.nn.utils.clip_grad_value_(self._unscaled(parameters), clip_value)
