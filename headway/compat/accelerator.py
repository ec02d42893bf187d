"""The Accelerator and LR schedulers with Accelerate's behavior."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

from headway import accelerator as native
from headway.compat.data_loader import prepare_data_loader
from headway.compat.forwarding import forward
from headway.data.script_loaders import as_plain, is_plain
from headway.distributed.collectives import Reduction
from headway.distributed.handler import checks
from headway.distributed.nested import for_each_tensor, leaves
from headway.distributed.world import rank_and_size, rank_and_size_without_group
from headway.errors import Code, UsageError
from headway.ipc.stderr import log
from headway.training.arguments import Arguments
from headway.training.metrics import gather_for_metrics
from headway.training.optimizer import PreparedOptimizer, PreparedScheduler, scheduler_options
from headway.training.preparer import Preparer
from headway.training.steps import Tensors

__getattr__, __dir__ = forward(__name__)


class AcceleratedScheduler(PreparedScheduler):
    """An LR scheduler that counts single-process steps: `step()` steps it once per rank.

    With `split_batches`, where the ranks share a batch, `step()` steps once. It does not step
    during gradient accumulation or after an overflow (fp16). In contrast, the LR schedulers of
    `headway.Accelerator` are defined in optimizer steps.

    Args:
        scheduler: The script's LR scheduler.
        optimizers: Prepared optimizers. If any of them skips its step, the scheduler does too.
        step_with_optimizer: If False, each call is one step, regardless of the optimizers.
        split_batches: Whether the loaders' batch size is the total over all ranks.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        optimizers: PreparedOptimizer | Sequence[PreparedOptimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.hyperparameters = scheduler_options(scheduler)
        self.optimizers = (
            [optimizers] if isinstance(optimizers, PreparedOptimizer) else list(optimizers)
        )
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step once per rank if the optimizers stepped; arguments are passed to the scheduler."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif not any(optimizer.is_withheld for optimizer in self.optimizers):
            for _ in range(1 if self.split_batches else rank_and_size()[1]):
                if not self._is_finished():
                    self.scheduler.step(*args, **kwargs)

    def _is_finished(self) -> bool:
        """Return whether a fixed-length scheduler (OneCycleLR) is finished."""
        if self.split_batches or not hasattr(self.scheduler, "total_steps"):
            return False
        return bool(self.scheduler._step_count > self.scheduler.total_steps)


class _Preparer(Preparer):
    def make_loader(self, loader: Any, device: torch.device | None) -> None:
        plain = as_plain(loader)
        if not is_plain(plain):
            super().make_loader(loader, device)
            return
        strategy, data = self.training.strategy, self.data
        prepared: Any = prepare_data_loader(
            plain,
            device,
            num_processes=strategy.data_size,
            process_index=strategy.data_rank,
            split_batches=data.split_batches,
            put_on_device=device is not None,
            rng_types=[*self.rng_types],
            dispatch_batches=data.dispatch_batches,
            even_batches=data.even_batches,
            use_seedable_sampler=data.use_seedable_sampler,
            data_seed=data.data_seed,
            non_blocking=data.non_blocking,
            use_stateful_dataloader=data.use_stateful_dataloader,
        )
        self.training.remember(loader, prepared)

    def make_scheduler(self, scheduler: Any, _: torch.device | None) -> None:
        if isinstance(scheduler, LRScheduler):
            own = self.training.find(scheduler.optimizer)
            prepared = AcceleratedScheduler(
                scheduler,
                self.training.optimizers if own is None else own,
                step_with_optimizer=self.step_scheduler_with_optimizer,
                split_batches=self.data.split_batches,
            )
            self.training.remember(scheduler, prepared)


@checks(but=("accumulate",))
class Accelerator(native.Accelerator):
    """`headway.Accelerator` for scripts that rely on Accelerate's behavior.

    - An LR scheduler steps once per rank: see `AcceleratedScheduler`.
    - An LR scheduler whose optimizer is not prepared follows all prepared optimizers.
    - Gradients are clipped in every micro-batch, even during gradient accumulation.
    - Loaders pad the last round to full batches; see `headway.compat.data_loader`. Loaders with a
      custom `__iter__` are an exception: they are sharded as in `headway.Accelerator`.
    - `split_batches=True` has no effect as an argument; use `DataLoaderConfiguration`.
    - `reduce` sums even with `reduction="none"`, keeps each tensor's dtype, and ignores `scale`.
    - After `load_state`, a loader restarts its epoch. To resume within the epoch, use
      `skip_first_batches` or `use_stateful_dataloader=True`. `checkpoint` saves immediately, and
      `resume` raises an error.
    """

    _preparer_type = _Preparer
    _requires_ranks = False

    # accessed by libraries
    _models = property(lambda self: self.parts.training.models)
    _optimizers = property(lambda self: self.parts.training.optimizers)
    _schedulers = property(lambda self: self.parts.training.schedulers)
    _dataloaders = property(lambda self: self.parts.training.all_loaders)
    _custom_objects = property(lambda self: self.parts.training.registered)

    step = 0
    """The number of micro-batches since the start of training or the end of a loader."""

    @property
    def flag_tensor(self) -> torch.Tensor:
        """Whether this rank has called `set_trigger()`, as a scalar tensor: 1 or 0."""
        return torch.tensor(int(self.parts.steps.is_triggered), device=self.device)

    def _accepted(self, arguments: Arguments) -> Arguments:
        """Raise UsageError for unsupported arguments; reset arguments that Accelerate ignores."""
        for name in ("seed", "global_batch_size"):
            if getattr(arguments, name) is not None:
                raise UsageError(
                    f"{name} is not supported by loaders with Accelerate's behavior",
                    where="the script's headway.compat.Accelerator(...)",
                    fix=f"use `from headway import Accelerator`, or remove {name}",
                    code=Code.UNSUPPORTED,
                )
        if arguments.split_batches and rank_and_size_without_group()[0] == 0:
            log(
                "note: split_batches=True has no effect, as in Accelerate; pass"
                " dataloader_config=DataLoaderConfiguration(split_batches=True) to split batches"
            )
        return replace(arguments, split_batches=False)

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[Any]:
        """Start a micro-batch and count it in `step`."""
        ends = self.gradient_state.sync_with_dataloader and self.gradient_state.end_of_dataloader
        self.step = 0 if ends else self.step + 1
        return super().accumulate(*models)

    def clip_grad_norm_(
        self, parameters: Tensors, max_norm: float, norm_type: float | Literal["inf"] = 2
    ) -> torch.Tensor:
        """Clip the gradient norm, even during accumulation, and return the norm before clipping."""
        unscaled = self.parts.steps.unscaled(parameters)
        return self.parts.training.strategy.clip_grad_norm_(unscaled, max_norm, float(norm_type))

    def clip_grad_value_(self, parameters: Tensors, clip_value: float) -> None:
        """Clip gradients to [-clip_value, clip_value], even during accumulation."""
        unscaled = self.parts.steps.unscaled(parameters)
        self.parts.training.strategy.clip_grad_value_(unscaled, clip_value)

    def free_memory(self, *objects: Any) -> list[None]:
        """Release all prepared objects and reset `step` to 0."""
        self.step = 0
        return super().free_memory(*objects)

    clear = free_memory

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather results from all ranks; drop per-sample results of repeated samples."""
        return gather_for_metrics(input_data, use_gather_object, strict=False)

    def reduce(self, tensor: Any, reduction: Reduction = "sum", scale: float = 1.0) -> Any:
        """Return the sum, mean or maximum of each tensor over all ranks; `scale` has no effect."""
        total = super().reduce(tensor, "sum" if reduction == "none" else reduction)
        own = leaves(tensor)  # in the same order
        if reduction == "mean":
            return total
        return for_each_tensor(lambda t: t.to(next(own).dtype), total)
