"""Prepares the script's models, optimizers, data loaders and schedulers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from headway.data.configuration import DataLoaderConfiguration, check_configuration, micro_batch_of
from headway.data.loader import PreparedDataLoader
from headway.data.script_loaders import as_plain
from headway.distributed.rng import RNGType, agreed_types
from headway.errors import Code, UsageError
from headway.ipc.stderr import log_once
from headway.precision.precision import Bf16
from headway.training.optimizer import PreparedOptimizer, PreparedScheduler
from headway.training.replicas import next_comparison, note_unprepared, note_unused, require_equal
from headway.training.training import Training


class Preparer:
    """Prepares objects and registers them with a Training; see `Accelerator`."""

    def __init__(
        self,
        training: Training,
        data: DataLoaderConfiguration,
        *,
        device_placement: bool = True,
        step_scheduler_with_optimizer: bool = True,
        rng_types: Sequence[str | RNGType] | None = None,
        seed: int | None = None,
        forward_methods: Sequence[str] | str = (),
    ) -> None:
        self.training = training
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = agreed_types(rng_types)
        self._data, self._seed = data, seed
        self._methods = [forward_methods] if isinstance(forward_methods, str) else forward_methods

    @property
    def data(self) -> DataLoaderConfiguration:
        return self._data

    @data.setter
    def data(self, config: DataLoaderConfiguration) -> None:
        check_configuration(config)
        is_global = self.training.global_batch_size is not None
        self._data = replace(config, split_batches=True) if is_global else config

    def prepare(
        self,
        *args: Any,
        device_placement: Sequence[bool | None] | None = None,
        trains: bool = True,
    ) -> Any:
        placement = [None] * len(args) if device_placement is None else device_placement
        if len(placement) != len(args):
            raise UsageError(
                f"device_placement has {len(placement)} entries for {len(args)} objects",
                where="the script's prepare(...)",
                fix="pass one entry per object, or omit device_placement",
                code=Code.BAD_ARGUMENT,
            )
        self.training.adopt_prepared(args)
        if trains:
            self._require_methods([arg for arg in args if isinstance(arg, torch.nn.Module)])

        def make_model(model: Any, device: torch.device | None) -> None:
            self.make_model(model, device, trains=trains)

        # models first: a strategy may replace the parameters that other objects refer to
        for make in (make_model, self.make_optimizer, self.make_scheduler, self.make_loader):
            for obj, place in zip(args, placement, strict=True):
                if self.training.find(obj) is None:
                    is_moved = self.device_placement if place is None else place
                    make(obj, self.training.world.device if is_moved else None)
        self._note_unchanged(obj for obj in args if self.training.find(obj) is None)
        results = [obj if (arg := self.training.find(obj)) is None else arg for obj in args]
        return results[0] if len(results) == 1 else tuple(results)

    def _require_methods(self, models: Sequence[torch.nn.Module]) -> None:
        for name in self._methods if models else ():
            if not any(hasattr(model, name) for model in (*models, *self.training.inner_models)):
                raise UsageError(
                    f"invalid value {name!r} for forward_methods: not a method of "
                    + type(models[0]).__name__,
                    where="the script's Accelerator(forward_methods=...)",
                    fix="pass names of the model's methods; with several models, prepare them"
                    " all together, or first prepare the model that has the method",
                    code=Code.BAD_ARGUMENT,
                )

    def _note_unchanged(self, objects: Iterable[Any]) -> None:
        """Log unprepared objects that look like optimizers, or like data that all ranks read."""
        ranks = self.training.world.ranks
        for obj in objects if ranks.rank == 0 else ():
            what = f"note: prepare() returned a {type(obj).__name__} unchanged"
            if all(hasattr(obj, name) for name in ("step", "zero_grad", "param_groups")):
                log_once(
                    f"{what}: it is not a torch.optim.Optimizer, so it also steps while gradients"
                    " accumulate, with scaled gradients in fp16, and checkpoints do not contain its"
                    " state unless it is registered; fix: derive its class from"
                    " torch.optim.Optimizer"
                )
            elif ranks.world_size == 1 or isinstance(obj, (str, torch.Tensor)):
                continue
            elif hasattr(type(obj), "__iter__"):
                log_once(
                    f"{what}: each of the {ranks.world_size} ranks has a full copy; fix: pass"
                    " objects to prepare() individually, and wrap data in a"
                    " torch.utils.data.DataLoader"
                )

    # ------------------------------------------- no-ops for objects of other types

    def make_model(self, model: Any, device: torch.device | None, *, trains: bool) -> None:
        """Prepare a model, and move it to `device` unless that is None."""
        training = self.training
        if isinstance(model, torch.nn.Module):
            if any(len(getattr(module, "hf_device_map", ())) > 1 for module in model.modules()):
                raise UsageError(
                    f"{type(model).__name__} spans several devices because of a device_map",
                    where="the script's prepare(...)",
                    fix="load the model without device_map; prepare() moves it to this rank's GPU",
                    code=Code.MODEL_DEVICE,
                )
            if trains:
                self._note_half(model)
            training.remember(
                model,
                training.strategy.prepare_model(model, training.precision, device, trains=trains),
            )
            if not trains:
                training.evaluation_models.add(training.find(model))
            for optimizer in training.optimizers:  # of an earlier prepare()
                training.strategy.rebind(optimizer.optimizer)

    def _note_half(self, model: torch.nn.Module) -> None:
        trained = {p.dtype for p in model.parameters() if p.requires_grad}
        has_mixed = isinstance(self.training.precision, Bf16) and self.training.world.is_main
        for half in trained & {torch.bfloat16, torch.float16} if has_mixed else ():
            log_once(
                f"note: weights of {type(model).__name__} are in {half}, which loses small updates;"
                f" mixed precision expects fp32; fix: omit .to({half}), or pass"
                ' mixed_precision="no"'
            )

    def make_optimizer(self, optimizer: Any, device: torch.device | None) -> None:
        training = self.training
        if isinstance(optimizer, torch.optim.Optimizer):
            training.strategy.rebind(optimizer)
            prepared = PreparedOptimizer(
                optimizer,
                device is not None,
                accumulation=training.accumulation,
                precision=training.precision,
                after_step=partial(self._compare_ranks, optimizer),
                averages_losses=training.strategy.data_size > 1,
            )
            training.remember(optimizer, prepared)

    def _compare_ranks(self, optimizer: torch.optim.Optimizer, step: int) -> int:
        if step:
            require_equal(self.training, f"optimizer.step() number {step}")
            note_unprepared(self.training, optimizer)
        if step == 1:
            note_unused(self.training)
        return next_comparison(step)

    def make_scheduler(self, scheduler: Any, _: torch.device | None) -> None:
        if isinstance(scheduler, LRScheduler):
            optimizer = self.training.find(scheduler.optimizer)
            if optimizer is None:
                raise UsageError(
                    f"{type(scheduler).__name__} has an optimizer that has not been prepared",
                    where="the script's prepare(...)",
                    fix=f"pass scheduler.optimizer, a {type(scheduler.optimizer).__name__}, to"
                    " prepare() together with the scheduler, or before it",
                    code=Code.NOT_PREPARED,
                )
            prepared = PreparedScheduler(
                scheduler, optimizer, step_with_optimizer=self.step_scheduler_with_optimizer
            )
            self.training.remember(scheduler, prepared)

    def make_loader(self, loader: Any, device: torch.device | None) -> None:
        if isinstance(loader, DataLoader):
            strategy, micro_batch = self.training.strategy, self.training.global_batch_size
            if micro_batch is not None:
                steps = self.training.accumulation.steps
                micro_batch = micro_batch_of(micro_batch, strategy.data_size, steps)
            # the states of samplers' generators are broadcast by the loader itself
            types = [kind for kind in self.rng_types if kind is not RNGType.GENERATOR]
            prepared = PreparedDataLoader(
                as_plain(loader),
                strategy.data_rank,
                strategy.data_size,
                config=self._data,
                micro_batch=micro_batch,
                device=device,
                rng_types=types,
                seed=self._seed,
                run=self.training.run,
                number=len(self.training.loaders),
            )
            self.training.remember(loader, prepared)
