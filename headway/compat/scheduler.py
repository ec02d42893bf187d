"""Accelerate's learning-rate schedules: one optimizer step moves them on by one for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from headway.compat.forwarding import forward
from headway.distributed.world import rank_and_size
from headway.training.optimizer import PreparedOptimizer, PreparedScheduler

__getattr__, __dir__ = forward(__name__)


class AcceleratedScheduler(PreparedScheduler):
    """A schedule written in steps of one process: each `step()` counts as many as there are ranks.

    With `split_batches`, where ranks share one batch, it counts once. While gradients accumulate,
    and after an overflow (fp16), it does not count. Compare `headway.Accelerator`, whose schedules
    are written in optimizer steps.

    Args:
        scheduler: the script's own.
        optimizers: prepared optimizers; the schedule waits when one of them has skipped its step.
        step_with_optimizer: False: every call is one step, whatever the optimizers did.
        split_batches: the loaders' batch size is that of all ranks together.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        optimizers: PreparedOptimizer | Sequence[PreparedOptimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = (
            [optimizers] if isinstance(optimizers, PreparedOptimizer) else list(optimizers)
        )
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step once for each rank, if the optimizers stepped; arguments go to the scheduler."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif not any(one.is_withheld for one in self.optimizers):
            for _ in range(1 if self.split_batches else rank_and_size()[1]):
                if not self._is_at_its_end():
                    self.scheduler.step(*args, **kwargs)

    def _is_at_its_end(self) -> bool:
        """Return whether a schedule of fixed length (OneCycleLR) allows no further step."""
        if self.split_batches or not hasattr(self.scheduler, "total_steps"):
            return False
        has_ended: bool = self.scheduler._step_count > self.scheduler.total_steps
        return has_ended
