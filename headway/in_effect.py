"""The settings of an Accelerator that are in effect, as scripts read and change them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from headway.arguments import CALL
from headway.data.configuration import DataLoaderConfiguration, check_configuration
from headway.data.skipping import skip_first_batches
from headway.errors import UsageError
from headway.plugins.accumulation import check_steps
from headway.plugins.handler import Handlers
from headway.plugins.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)
from headway.plugins.profiling import ProfileKwargs
from headway.stepping import Stepping


class InEffect(Stepping):
    """A rank that trains, and tells with which settings."""

    _handlers: Handlers

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How loaders that are prepared from now on share their data out."""
        return self._data

    @dataloader_config.setter
    def dataloader_config(self, config: DataLoaderConfiguration) -> None:
        check_configuration(config)
        is_global = self._global_batch_size is not None
        self._data = replace(config, split_batches=True) if is_global else config

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """The one in `kwargs_handlers`, if there is one."""
        return self._handlers.of(DistributedDataParallelKwargs)

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """The one in `kwargs_handlers`, if there is one."""
        return self._handlers.of(GradScalerKwargs)

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """The one in `kwargs_handlers`, if there is one."""
        return self._handlers.of(InitProcessGroupKwargs)

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """The one in `kwargs_handlers`, if there is one."""
        return self._handlers.of(AutocastKwargs)

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """The one in `kwargs_handlers`, if there is one."""
        return self._handlers.of(ProfileKwargs)

    @property
    def mixed_precision(self) -> str:
        """The precision in use: `no`, `fp16` or `bf16`."""
        return self._precision.name

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro-batches in one optimizer step; a script may change it."""
        return self._accumulation.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        check_steps("gradient_accumulation_steps", steps, CALL)
        if self._global_batch_size is not None and steps != self._accumulation.steps:
            raise UsageError(
                f"gradient_accumulation_steps is set to {steps}, but the batches of loaders follow"
                f" from {self._accumulation.steps} and global_batch_size={self._global_batch_size}",
                where="the script's assignment to .gradient_accumulation_steps",
                fix=f"pass Accelerator(gradient_accumulation_steps={steps}, global_batch_size=...)",
            )
        self._accumulation.steps = steps

    @property
    def native_amp(self) -> bool:
        """Whether `autocast()`, and models prepared from now on, compute under autocast.

        A script may set it to False; `mixed_precision` stays what it is.
        """
        return self._precision.uses_autocast

    @native_amp.setter
    def native_amp(self, uses_autocast: bool) -> None:
        if uses_autocast and self.mixed_precision == "no":
            raise UsageError(
                "native_amp is set to True, but mixed_precision is 'no'",
                where="the script's assignment to .native_amp",
                fix="pass mixed_precision='bf16' to Accelerator()",
            )
        self._precision.uses_autocast = uses_autocast

    @property
    def split_batches(self) -> bool:
        """See `DataLoaderConfiguration`."""
        return self._data.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """See `DataLoaderConfiguration`."""
        return self._data.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """See `DataLoaderConfiguration`; a script may change it."""
        return self._data.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._data.even_batches = even

    @property
    def use_seedable_sampler(self) -> bool:
        """See `DataLoaderConfiguration`."""
        return self._data.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """See `DataLoaderConfiguration`."""
        return self._data.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """See `DataLoaderConfiguration`."""
        return self._data.use_stateful_dataloader

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that leaves out the first batches of each pass.

        See `headway.skip_first_batches`.

        Args:
            dataloader: a prepared loader, or any other.
            num_batches: batches of this rank to leave out.

        Raises:
            UsageError: `num_batches` is not a whole number of at least 0.

        Examples:
            >>> loader = accelerator.prepare(torch.utils.data.DataLoader(range(6), batch_size=2))
            >>> [batch.tolist() for batch in accelerator.skip_first_batches(loader, 2)]
            [[4, 5]]
        """
        return skip_first_batches(dataloader, num_batches)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """What adapts fp16's loss scale; None in other precisions."""
        return self._precision.scaler
