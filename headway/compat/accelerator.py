"""The Accelerator that behaves as Accelerate's where the two differ."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from headway import accelerator as native
from headway.compat.data_loader import prepare_data_loader
from headway.compat.forwarding import forward
from headway.compat.scheduler import AcceleratedScheduler
from headway.data.sharding import is_plain
from headway.errors import UsageError
from headway.optimizer import PreparedOptimizer
from headway.stopping import say

__getattr__, __dir__ = forward(__name__)

Tensors = torch.Tensor | Iterable[torch.Tensor]


class Accelerator(native.Accelerator):
    """`headway.Accelerator` for scripts that rely on what Accelerate does differently.

    - A schedule steps once for each rank: see `AcceleratedScheduler`.
    - A schedule whose optimizer has not been prepared follows all prepared optimizers.
    - Gradients are clipped in every micro-batch, also while they accumulate.
    - Loaders fill the last round up to whole batches, see `headway.compat.data_loader`; only those
      with an `__iter__` of their own are shared out as by `headway.Accelerator`.
    - `split_batches=True` is for `DataLoaderConfiguration`: as an argument it has no effect.
    - `reduce` adds up also with `reduction="none"`, and its `scale` has no effect.
    - After `load_state` a loader begins its epoch anew; `skip_first_batches` goes on in it, and so
      does the loader itself with `use_stateful_dataloader=True`.
    """

    _skips_itself = True
    step = 0
    """The micro-batches since training began, or since a loader ended."""

    @property
    def flag_tensor(self) -> torch.Tensor:
        """Whether this rank has called `set_trigger()`: 0 or 1, of shape []."""
        return torch.tensor(int(self._is_triggered), device=self.device)

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[Any]:
        """Begin a micro-batch, and count it in `step`."""
        ends = self.gradient_state.sync_with_dataloader and self.gradient_state.end_of_dataloader
        self.step = 0 if ends else self.step + 1
        return super().accumulate(*models)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects, and count from 0 again."""
        self.step = 0
        return super().free_memory(*objects)

    clear = free_memory

    @wraps(native.Accelerator.__init__)  # type: ignore[misc]  # `headway adopt` reads its arguments
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name in ("seed", "global_batch_size"):
            if kwargs.get(name) is not None:
                raise UsageError(
                    f"loaders that behave as Accelerate's do not obey {name}",
                    where="the script's Accelerator(...) of headway.compat",
                    fix=f"use `from headway import Accelerator`, or remove {name}",
                )
        splits = bool(kwargs.pop("split_batches", False)) or args[1:2] == (True,)
        super().__init__(*args[:1], *([False, *args[2:]] if len(args) > 1 else []), **kwargs)
        if splits and self.is_main_process:
            say(
                "note: split_batches=True has no effect, as in Accelerate; pass"
                " dataloader_config=DataLoaderConfiguration(split_batches=True) to split batches"
            )

    def _prepare_loader(self, loader: Any, device: torch.device | None) -> None:
        if not is_plain(loader):
            super()._prepare_loader(loader, device)
            return
        prepared = prepare_data_loader(
            loader,
            device,
            num_processes=self._strategy.data_size,
            process_index=self._strategy.data_rank,
            split_batches=self.split_batches,
            put_on_device=device is not None,
            rng_types=[*self.rng_types],
            dispatch_batches=self.dispatch_batches,
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self._data.data_seed,
            non_blocking=self.non_blocking,
        )
        self._prepared.append((loader, prepared))

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

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum over ranks of each tensor, or its `mean` or `max`; see the class."""
        return super().reduce(tensor, "sum" if reduction == "none" else reduction)

    def clip_grad_norm_(
        self, parameters: Tensors, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip the gradients' norm, also while gradients accumulate, and return what it was."""
        return self._strategy.clip_grad_norm_(self._unscaled(parameters), max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensors, clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value], also while gradients accumulate."""
        self._strategy.clip_grad_value_(self._unscaled(parameters), clip_value)
