"""The object that training scripts use; it delegates to strategy, precision, loaders and so on."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import IO, TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from headway.accumulation import Accumulation
from headway.arguments import check_steps, merge_arguments, reject_unsupported
from headway.contract.records import beat, channel
from headway.contract.run import read_ranks, read_run
from headway.data.loader import PreparedDataLoader
from headway.errors import UsageError
from headway.optimizer import PreparedOptimizer, PreparedScheduler
from headway.placement import Devices, gpu_named_by
from headway.precision.bf16 import restore_forward
from headway.precision.choice import precision_for
from headway.process import Process
from headway.saving import save_into, save_whole
from headway.strategies.choice import StrategySettings, strategy_for
from headway.strategies.strategy import uncompiled
from headway.world import join_world

Tensors = torch.Tensor | Iterable[torch.Tensor]


class Accelerator(Process):
    """Prepare a training script for one process or many; names and meanings are Accelerate's.

    Under `headway launch` the launcher's settings apply; an argument given here overrides a profile
    or variable (one line on stderr says so) and may not contradict a flag. Under plain python or
    torchrun the device is the best one there, the precision `no`, the accumulation 1.

    Args:
        device_placement: move models and batches to `device`.
        split_batches: the loaders' batch_size is that of all ranks together, not of each.
        mixed_precision: `no`, `fp16` or `bf16`.
        gradient_accumulation_steps: micro-batches in one optimizer step.
        cpu: use the CPU, even where there is a GPU.
        device: `auto`, `cpu`, `cuda`, `gpu` (cuda, or mps on a Mac) or `mps`.
        devices: which GPU, written as for `headway launch --devices`: `[1]`, `"1,"`, `"idle:1"`.
            Several need the launcher; under it they must agree with what it started.
        step_scheduler_with_optimizer: a scheduler's `step()` counts only after an optimizer step.
        unsupported: Accelerate's other arguments are refused, unless they are None.

    Raises:
        UsageError: an argument is impossible, unknown, or contradicts a flag.
        MachineError: this machine does not have the device or precision.
        LaunchError: the ranks cannot form a group.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        *,
        device: str | None = None,
        devices: Devices | None = None,
        step_scheduler_with_optimizer: bool = True,
        **unsupported: NoReturn,
    ) -> None:
        reject_unsupported(unsupported)
        agreed = merge_arguments(
            read_run(),
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            cpu=cpu,
            device=device,
        )
        self.device_placement = device_placement
        self.split_batches = split_batches
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        gpu = None if devices is None else gpu_named_by(devices, agreed.device, read_ranks())
        super().__init__(join_world(agreed.device if gpu is None else "cuda", gpu))
        self._precision = precision_for(
            agreed.mixed_precision, self.device, where=agreed.precision_from
        )
        self._strategy = strategy_for(self._world, StrategySettings())
        self._accumulation = Accumulation(agreed.gradient_accumulation_steps)
        self._prepared: list[tuple[Any, Any]] = []  # the script's object, and ours
        channel.has_made_accelerator = True
        if self.is_main_process and agreed.notes:
            print(*agreed.notes, sep="\n", file=sys.stderr, flush=True)

    # ------------------------------------------------------------------ settings in effect

    @property
    def mixed_precision(self) -> str:
        return self._precision.name

    @property
    def gradient_accumulation_steps(self) -> int:
        return self._accumulation.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        check_steps(steps)
        self._accumulation.steps = steps

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are due: optimizers step, and ranks exchange gradients."""
        return self._accumulation.sync_gradients

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer skipped its last step, because fp16 gradients overflowed."""
        return any(one.step_was_skipped for one in self._all(PreparedOptimizer))

    # ------------------------------------------------------------------ prepare

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Return models, optimizers, data loaders and schedulers made ready, in the given order.

        An object of another kind, or one that is prepared already, is returned as it is. One
        argument gives the object itself, several a tuple. A process needs one Accelerator only; it
        does not take what another one prepared.

        Args:
            device_placement: for each argument, whether it is moved to `device`.

        Raises:
            UsageError: a scheduler's optimizer has not been prepared, a loader cannot be shared
                out, or an object is another Accelerator's.
        """
        placement = device_placement
        if placement is None:
            placement = [self.device_placement] * len(args)
        if len(placement) != len(args):
            raise UsageError(
                f"device_placement has {len(placement)} entries for {len(args)} objects",
                where="the script's prepare(...)",
                fix="give one entry for each object, or leave device_placement out",
            )
        self._refuse_others(args)
        # a strategy may replace the parameters of models: what holds them comes later
        for prepare in (
            self._prepare_model,
            self._prepare_optimizer,
            self._prepare_scheduler,
            self._prepare_loader,
        ):
            for obj, place in zip(args, placement, strict=True):
                if self._find(obj) is None:
                    prepare(obj, self.device if place else None)
        found = [self._find(obj) for obj in args]
        results = [obj if one is None else one for obj, one in zip(args, found, strict=True)]
        return results[0] if len(results) == 1 else tuple(results)

    def _refuse_others(self, objects: Iterable[Any]) -> None:
        for obj in objects:
            kinds = (PreparedOptimizer, PreparedDataLoader, PreparedScheduler)
            if isinstance(obj, kinds) and self._find(obj) is None:
                raise UsageError(
                    f"prepare() got a {type(obj).__name__} that another Accelerator prepared",
                    where="the script's prepare(...)",
                    fix="use one Accelerator everywhere, and prepare new objects after"
                    " free_memory()",
                )

    def _prepare_model(self, model: Any, device: torch.device | None) -> None:
        if isinstance(model, torch.nn.Module):
            prepared = self._strategy.prepare_model(model, self._precision, device)
            self._prepared.append((model, prepared))
            for one in self._all(PreparedOptimizer):  # of an earlier prepare()
                self._strategy.rebind(one.optimizer)

    def _prepare_optimizer(self, optimizer: Any, _: torch.device | None) -> None:
        if isinstance(optimizer, torch.optim.Optimizer):
            self._strategy.rebind(optimizer)
            prepared = PreparedOptimizer(optimizer, self._accumulation, self._precision)
            self._prepared.append((optimizer, prepared))

    def _prepare_scheduler(self, scheduler: Any, _: torch.device | None) -> None:
        if isinstance(scheduler, LRScheduler):
            optimizer = self._find(scheduler.optimizer)
            if optimizer is None:
                raise UsageError(
                    f"{type(scheduler).__name__} has an optimizer that has not been prepared",
                    where="the script's prepare(...)",
                    fix="give the optimizer to prepare() together with the scheduler, or before it",
                )
            prepared = PreparedScheduler(
                scheduler, optimizer, step_with_optimizer=self.step_scheduler_with_optimizer
            )
            self._prepared.append((scheduler, prepared))

    def _prepare_loader(self, loader: Any, device: torch.device | None) -> None:
        if isinstance(loader, DataLoader):
            prepared = PreparedDataLoader(
                loader,
                self._strategy.data_rank,
                self._strategy.data_size,
                split_batches=self.split_batches,
                device=device,
            )
            self._prepared.append((loader, prepared))

    def _find(self, obj: Any) -> Any:
        """Return what `obj` was prepared as; None if it was not."""
        pairs = (pair for pair in self._prepared if obj is pair[0] or obj is pair[1])
        return next(pairs, (None, None))[1]

    def _all(self, kind: type[Any]) -> list[Any]:
        return [prepared for _, prepared in self._prepared if isinstance(prepared, kind)]

    def unwrap_model(
        self,
        model: torch.nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> torch.nn.Module:
        """Return the model that `prepare` was given; one that was compiled since stays compiled.

        Args:
            keep_fp32_wrapper: let the model go on computing under autocast.
            keep_torch_compile: return a compiled model as such.
        """
        model = self._strategy.unwrap(model)
        if not keep_torch_compile:
            model = uncompiled(model)
        if not keep_fp32_wrapper:
            restore_forward(uncompiled(model))
            restore_forward(model)
        return model

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects, free what they held, and begin a new accumulation.

        Returns:
            A None for each of `objects`: `model, optimizer = accelerator.free_memory(model, ...)`.
        """
        self._prepared.clear()
        self._accumulation.reset()
        freed = [None] * len(objects)
        del objects
        gc.collect()
        if self.device.type == "cuda":  # pragma: needs a GPU
            torch.cuda.empty_cache()
        elif self.device.type == "mps":
            torch.mps.empty_cache()
        return freed

    clear = free_memory

    # ------------------------------------------------------------------ train

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which operations outside a prepared model use the precision."""
        return self._precision.autocast()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Add the gradients of `loss` / gradient_accumulation_steps; `kwargs` go to backward()."""
        if self._accumulation.steps > 1:
            given = kwargs.get("gradient")
            if given is not None:
                kwargs["gradient"] = given / self._accumulation.steps
            elif loss.numel() == 1:  # for others torch says that it needs a gradient
                kwargs["gradient"] = self._accumulation.gradient_of(loss)
        channel.phase = "backward"
        if channel.fd is not None:
            beat()
        try:
            self._precision.backward(loss, **kwargs)
        finally:
            channel.phase = "script"

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[Any]:
        """Begin a micro-batch: every n-th one and the loader's last one make an optimizer step.

        The last step of an epoch may have fewer than n micro-batches; each still counts 1/n.

        Args:
            models: those trained here; without any, all prepared models.

        Returns:
            The context for the micro-batch's forward and backward pass.
        """
        self._accumulation.begin_micro_batch()
        if self._accumulation.sync_gradients:
            return nullcontext()
        if len(models) == 1:
            return self.no_sync(models[0])
        stack = ExitStack()
        for model in models or self._all(torch.nn.Module):
            stack.enter_context(self.no_sync(model))
        return stack

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which gradients of `model` stay on their rank."""
        return self._strategy.no_sync(model)

    def clip_grad_norm_(
        self, parameters: Tensors, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip the gradients' norm, unless gradients accumulate, and return what it was."""
        if self.sync_gradients:
            return self._strategy.clip_grad_norm_(self._unscaled(parameters), max_norm, norm_type)
        norm = self._strategy.total_norm(_as_list(parameters), norm_type)
        return norm / self._precision.loss_scale()

    def clip_grad_value_(self, parameters: Tensors, clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value], unless gradients accumulate."""
        if self.sync_gradients:
            torch.nn.utils.clip_grad_value_(self._unscaled(parameters), clip_value)

    def _unscaled(self, parameters: Tensors) -> list[torch.Tensor]:
        tensors = _as_list(parameters)
        self._precision.unscale([one.optimizer for one in self._all(PreparedOptimizer)], tensors)
        return tensors

    # ------------------------------------------------------------------ save

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state of a model. Call it on every rank: each may hold a part of it.

        Args:
            unwrap: use the names that the weights had before `prepare`.
        """
        return self._strategy.state_dict(self.unwrap_model(model) if unwrap else model)

    def save(
        self, obj: Any, f: str | os.PathLike[str] | IO[bytes], safe_serialization: bool = False
    ) -> None:
        """Write `obj` on rank 0, atomically: a file is replaced in full or not at all.

        Args:
            f: a path, or an open binary file.
            safe_serialization: write a state dict with safetensors instead of torch.save.
        """
        if not self.is_main_process:
            return
        if isinstance(f, (str, os.PathLike)):
            save_whole(obj, f, safe=safe_serialization)
        else:
            save_into(obj, f, safe=safe_serialization)

    if not TYPE_CHECKING:  # a type checker knows every member that there is

        def __getattr__(self, name: str) -> Any:
            from headway.migration.missing import refuse_member  # only for what is missing

            refuse_member(name, self)
            return object.__getattribute__(self, name)  # raises what it raised before


def _as_list(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
