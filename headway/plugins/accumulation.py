"""How gradients accumulate over micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from headway.errors import UsageError
from headway.plugins.handler import KwargsHandler


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients accumulate over micro-batches; in place of `gradient_accumulation_steps`.

    Args:
        num_steps: micro-batches in one optimizer step; None is what the launcher says, else 1.
        adjust_scheduler: whether the schedule is written in optimizer steps. The learning rates are
            the same either way, as in Accelerate: a prepared scheduler never steps while
            gradients accumulate.
        sync_with_dataloader: the last batch of a loader makes an optimizer step, and begins the
            count anew. With False the count goes on over epochs.
        sync_each_batch: ranks exchange gradients in every backward pass: slower, but without the
            memory that unexchanged gradients need in some strategies.

    Raises:
        UsageError: `num_steps` is not a whole number of at least 1.

    Example:
        >>> GradientAccumulationPlugin(num_steps=4).to_kwargs()
        {'num_steps': 4}
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is not None:
            check_steps("num_steps", self.num_steps, "the script's GradientAccumulationPlugin(...)")


def check_steps(name: str, steps: object, where: str) -> None:
    """Raise UsageError unless `steps` is a number of micro-batches."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise UsageError(
            f"{name} is {steps!r}, not a whole number of at least 1",
            where=where,
            fix="pass the number of micro-batches in one optimizer step",
        )
