"""Counts the steps of a script that trains without an Accelerator, by torch's hook for optimizers.

The launcher has this module imported once the script has imported torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from headway.devices.table import kind_of
from headway.ipc.progress import Progress, process_progress


def join(_: object = None) -> None:
    register_optimizer_step_post_hook(PlainSteps(process_progress()).end)


class PlainSteps:
    """Counts steps, where neither an Accelerator nor a library's Trainer does.

    With several optimizers, as for a GAN, a step is over when one of them steps again.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._num_steps = 0
        self._have_stepped: set[int] = set()  # optimizers, since the last step was over

    def end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note the end of an optimizer's step; compiled optimizers are not counted."""
        progress = self._progress
        if torch.compiler.is_compiling() or progress.uses.accelerator:
            return
        if progress.clock.device is None:
            groups = optimizer.param_groups
            devices = (p.device for group in groups for p in group["params"])
            device = next(devices, torch.device("cpu"))
            progress.clock.watch_device(kind_of(device.type), device)
        if progress.uses.stopping:  # the Trainer that saves then tells its steps, too
            return
        if self._have_stepped and id(optimizer) not in self._have_stepped:
            self._have_stepped.add(id(optimizer))
            return
        self._have_stepped = {id(optimizer)}
        self._num_steps += 1
        progress.follow(self._num_steps, 0, None)
