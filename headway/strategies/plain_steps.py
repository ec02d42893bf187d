"""Uses a global optimizer hook to count the steps of scripts that have no Accelerator.

Each rank imports this module right after torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from headway.ipc.progress import Progress, process_progress


def install(_: object = None) -> None:
    register_optimizer_step_post_hook(PlainSteps(process_progress()).end)


class PlainSteps:
    """Counts steps if neither an Accelerator nor a library's Trainer counts them.

    With several optimizers, as in a GAN, a step ends when one of the optimizers steps again.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._num_steps = 0
        self._have_stepped: set[int] = set()  # ids of optimizers, since the last step ended

    def end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record that an optimizer has stepped; compiled optimizers are not counted."""
        progress = self._progress
        if torch.compiler.is_compiling() or progress.feature_use.accelerator:
            return
        if progress.clock.device is None:
            devices = (p.device for group in optimizer.param_groups for p in group["params"])
            device = next(devices, torch.device("cpu"))
            progress.clock.watch_device(device)
        if progress.feature_use.stopping:  # the Trainer that saves also reports its steps
            return
        if self._have_stepped and id(optimizer) not in self._have_stepped:
            self._have_stepped.add(id(optimizer))
            return
        self._have_stepped = {id(optimizer)}
        self._num_steps += 1
        progress.follow(self._num_steps, 0, None)
