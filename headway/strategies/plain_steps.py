"""Sees the steps of a script that trains without an Accelerator, and when its DDP models wait.

torch has public hooks for all optimizers, and for each module that becomes part of another one. No
object of the script has anything of Headway's that would be saved or copied with it. The launcher
has this module imported once the script has imported torch.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from headway.contract.progress import Progress, process_progress
from headway.devices.table import kind_of
from headway.strategies.exchange_time import note_whole_exchange


def join(_: object = None) -> None:
    """See all steps of this process from now on."""
    steps = PlainSteps(process_progress())
    register_module_module_registration_hook(steps.note_part)
    register_optimizer_step_post_hook(steps.end)


class PlainSteps:
    """Counts steps, where neither an Accelerator nor a library's Trainer does.

    Of several optimizers, as of a GAN, a step is over when one of them steps again.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._num_steps = 0
        self._knows_device = False
        self._have_stepped: set[int] = set()  # optimizers, since the last step was over
        self._made: list[ref[DistributedDataParallel]] = []  # models that have not trained yet

    def note_part(self, owner: torch.nn.Module, name: str, _: object) -> None:
        """Note a DDP model, which is being made."""
        if name == "module" and isinstance(owner, DistributedDataParallel):
            self._made.append(ref(owner))

    def end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note the end of an optimizer's step; nothing is known of one that is compiled."""
        progress = self._progress
        if torch.compiler.is_compiling() or progress.uses.accelerator:
            return
        while self._made:
            model = self._made.pop()()
            if model is not None and not model.find_unused_parameters:
                note_whole_exchange(model, progress)
        if not self._knows_device:
            self._knows_device = True
            groups = optimizer.param_groups
            devices = (one.device for group in groups for one in group["params"])
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
