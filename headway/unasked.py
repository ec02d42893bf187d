"""Notices that a script trains without asking whether it has to stop."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

_STEPS = 2
"""A loop that asks does so after its first step; one that has made so many has not asked."""


class Unasked:
    """Watches the steps of optimizers until the script asks for the first time.

    It uses torch's own hooks of optimizers, so that steps cost nothing once they are removed.

    Args:
        then: called once, after a step of a script that does not ask.
        deadline: by time.monotonic(), at which `at_deadline` is called; None: there is none.
        at_deadline: called once, after the first step then.
    """

    def __init__(
        self, then: Callable[[], None], deadline: float | None, at_deadline: Callable[[], None]
    ) -> None:
        self._then, self._deadline, self._at_deadline = then, deadline, at_deadline
        self._hooks: list[RemovableHandle] = []
        self._watched: list[torch.optim.Optimizer] = []
        self._steps: Counter[int] = Counter()  # of each optimizer

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch one more optimizer, if it is not watched already."""
        if not any(one is optimizer for one in self._watched):
            self._watched.append(optimizer)
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def end(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._steps[id(optimizer)] += 1
        if self._steps[id(optimizer)] < _STEPS:
            return
        is_over = self._deadline is not None and time.monotonic() >= self._deadline
        if is_over or self._deadline is None:
            self.end()
        if is_over:
            self._at_deadline()
        self._then()
