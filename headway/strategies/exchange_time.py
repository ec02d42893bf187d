"""Tells in which part of a DDP backward pass a rank only waits for the exchange of gradients.

DDP exchanges gradients while a backward pass computes others, and at its end waits for what is
left. So a rank waits from its last gradient on. Hooks of torch's public
`register_post_accumulate_grad_hook` note it: at first on all parameters, and after some passes on
those alone that came last in one of them, so that a step pays for one call. Such a hook runs before
DDP's own, which starts the exchange of the last bucket. Relied on is that all ranks compute the
same graph in each pass; where parameters may be unused, nothing is noted, and waiting counts as the
backward pass. So does all waiting of ranks that share a model out: they do so at each layer.

On a GPU this is when the work was queued, not when it was done.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from headway.contract.records import channel
from headway.contract.step_clock import FORWARD, SYNC, clock

_NUM_PASSES = 3  # in which all parameters are looked at; DDP orders its buckets after the first


def note_exchange(model: DistributedDataParallel) -> None:
    """Let `clock` know when backward passes of a model wait for other ranks.

    Each parameter that requires a gradient must get one in every pass.
    """
    _LastGradient([one for one in model.module.parameters() if one.requires_grad])


def note_buffers(model: DistributedDataParallel) -> None:
    """Let `clock` know that a forward pass waits for rank 0's buffers before it computes."""
    if any(True for _ in model.module.buffers()):
        model.register_forward_pre_hook(_begin_buffers)
        model.module.register_forward_pre_hook(_end_buffers)


def _begin_buffers(*_: Any) -> None:
    if clock.phase == FORWARD:
        clock.switch(SYNC)


def _end_buffers(*_: Any) -> None:
    if clock.phase == SYNC:
        clock.switch(FORWARD)


class _LastGradient:
    """Finds out which parameters' gradients come last, and looks at these alone from then on."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._handles = {
            number: one.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._look, number)
            )
            for number, one in enumerate(parameters)
        }
        self._last = -1  # the parameter whose gradient came last
        self._pass = -1  # told from the others by how much this process has trained
        self._lasts: list[int] = []  # of the passes that have ended
        self._is_learning = True

    def _look(self, number: int, _: torch.Tensor) -> None:
        clock.begin_exchange()
        if self._is_learning:
            if channel.num_trained != self._pass:
                self._begin_pass(number)
            self._last = number

    def _begin_pass(self, number: int) -> None:
        self._pass = channel.num_trained
        if self._last >= 0:
            self._lasts.append(self._last)
        if len(self._lasts) == _NUM_PASSES:
            self._is_learning = False
            for other in self._handles.keys() - {*self._lasts, number}:  # its own hook runs now
                self._handles[other].remove()
