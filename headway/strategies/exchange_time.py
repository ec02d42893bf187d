"""Tells in which part of a DDP backward pass a rank only waits for the exchange of gradients.

A rank waits from its last gradient to the end of the pass. Hooks of torch's public
`register_post_accumulate_grad_hook` note it: at first on all parameters, and after some passes on
those alone that came last in one of them, so that a step pays for one call. All ranks must compute
the same graph in each pass. Where parameters may be unused, and where ranks share a model, waiting
counts as the backward pass.

On a GPU the hooks run when a gradient is queued; the clock then has an event of the device there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from headway.contract.progress import Progress
from headway.contract.step_clock import FORWARD, SYNC, StepClock

_NUM_PASSES = 3  # in which all parameters are looked at; DDP orders its buckets after the first


def note_exchange(model: DistributedDataParallel, progress: Progress) -> None:
    """Count the time that a model's backward passes wait for other ranks.

    Each parameter that requires a gradient must get one in every pass.
    """
    _LastGradient(model, progress)


def note_buffers(model: DistributedDataParallel, clock: StepClock) -> None:
    """Count the time that a forward pass waits for rank 0's buffers before it computes."""

    def begin(*_: Any) -> None:
        if clock.phase == FORWARD:
            clock.switch(SYNC)

    def end(*_: Any) -> None:
        if clock.phase == SYNC:
            clock.switch(FORWARD)

    if any(True for _ in model.module.buffers()):
        model.register_forward_pre_hook(begin)
        model.module.register_forward_pre_hook(end)


class _LastGradient:
    """Finds which parameters' gradients come last, and then watches only these."""

    def __init__(self, model: DistributedDataParallel, progress: Progress) -> None:
        trained = (one for one in model.module.parameters() if one.requires_grad)
        self._progress = progress
        self._hooks = {
            number: one.register_post_accumulate_grad_hook(partial(self._look, number))
            for number, one in enumerate(trained)
        }
        progress.passes.append(self._end_pass)
        self._last: int | None = None  # the parameter whose gradient came last in this pass
        self._lasts: list[int] = []  # of the passes so far

    def _look(self, number: int, _: torch.Tensor) -> None:
        self._progress.clock.begin_exchange()
        self._last = number

    def _end_pass(self) -> None:
        if self._last is not None:
            self._lasts.append(self._last)
            self._last = None
        if len(self._lasts) == _NUM_PASSES:
            for needless in self._hooks.keys() - {*self._lasts}:
                self._hooks[needless].remove()
            self._progress.passes.remove(self._end_pass)
