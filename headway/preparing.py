"""Makes the script's models, optimizers, data loaders and schedulers ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from headway.accumulation import Accumulation
from headway.data.configuration import DataLoaderConfiguration
from headway.data.global_batch import micro_batch_of, with_micro_batch
from headway.data.loader import PreparedDataLoader
from headway.device_memory import clear_device_cache
from headway.errors import UsageError
from headway.generators import RNGType, agreed_types, synchronize_rng_states
from headway.optimizer import PreparedOptimizer, PreparedScheduler
from headway.precision.precision import Precision
from headway.prepared_objects import PreparedObjects
from headway.strategies.strategy import Strategy
from headway.token_mean import TokenMean
from headway.world import World


class Preparing(PreparedObjects):
    """A rank that prepares a script's objects, and remembers them.

    Args:
        device_placement: move models and batches to `device`.
        data: how prepared loaders share their data out.
        step_scheduler_with_optimizer: a scheduler's `step()` counts only after an optimizer step.
        rng_types: the random generators that all ranks get from rank 0 at each pass over a loader.
        seed: of the samples of prepared loaders; None leaves generators alone.
        global_batch_size: samples in an optimizer step; None leaves loaders their batch sizes.
    """

    def __init__(
        self,
        world: World,
        precision: Precision,
        strategy: Strategy,
        accumulation: Accumulation,
        *,
        device_placement: bool,
        data: DataLoaderConfiguration,
        step_scheduler_with_optimizer: bool,
        rng_types: Sequence[str | RNGType] | None,
        seed: int | None = None,
        global_batch_size: int | None = None,
    ) -> None:
        super().__init__(world, strategy)
        self.device_placement = device_placement
        self._data = data
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = agreed_types(rng_types)
        self._seed = seed
        self._global_batch_size = global_batch_size
        self._precision = precision
        self._accumulation = accumulation
        self._token_mean = TokenMean()

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Return models, optimizers, data loaders and schedulers made ready, in the given order.

        An object of another kind, or one that is prepared already, is returned as it is. One
        argument gives the object itself, several a tuple. A process needs one Accelerator only; it
        does not take what another one prepared.

        Args:
            args: torch's objects, or those of classes derived from torch's.
            device_placement: for each argument, whether it is moved to `device`.

        Raises:
            UsageError: a scheduler's optimizer has not been prepared, a loader cannot be shared
                out, or an object is another Accelerator's.

        Examples:
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> loader = torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=4)
            >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            >>> [model(batch).shape for batch in loader]
            [torch.Size([4, 1]), torch.Size([2, 1])]
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

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        """Return one model made ready, as `prepare` does.

        Args:
            device_placement: whether it is moved to `device`; None is the Accelerator's setting.
            evaluation_mode: the model will not be trained: it computes in the precision and is
                compiled, but its ranks exchange nothing.

        Raises:
            UsageError: it is no model, or is spread over several devices.

        Examples:
            >>> teacher = accelerator.prepare_model(torch.nn.Linear(2, 1), evaluation_mode=True)
            >>> teacher(torch.ones(4, 2)).shape
            torch.Size([4, 1])
        """

        def prepare(model: Any, device: torch.device | None) -> None:
            self._prepare_model(model, device, trains=not evaluation_mode)

        return self._prepare_one("prepare_model", model, prepare, device_placement)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        """Return one optimizer made ready, as `prepare` does.

        Args:
            device_placement: without effect: an optimizer's state is where its weights are.

        Raises:
            UsageError: it is no optimizer, or another Accelerator's.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = accelerator.prepare_optimizer(torch.optim.SGD([weight], lr=0.1))
        """
        return self._prepare_one(
            "prepare_optimizer", optimizer, self._prepare_optimizer, device_placement
        )

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None
    ) -> Any:
        """Return one data loader made ready, as `prepare` does.

        Args:
            data_loader: a `torch.utils.data.DataLoader`.
            device_placement: whether batches are moved to `device`; None is the Accelerator's
                setting.

        Raises:
            UsageError: it is no data loader, cannot be shared out, or is another Accelerator's.

        Examples:
            >>> loader = torch.utils.data.DataLoader(range(3), batch_size=2)
            >>> [batch.tolist() for batch in accelerator.prepare_data_loader(loader)]
            [[0, 1], [2]]
        """
        return self._prepare_one(
            "prepare_data_loader", data_loader, self._prepare_loader, device_placement
        )

    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:
        """Return one scheduler made ready, as `prepare` does; its optimizer comes first.

        Raises:
            UsageError: it is no scheduler, its optimizer has not been prepared, or it is another
                Accelerator's.

        Examples:
            >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
            >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
            >>> optimizer = accelerator.prepare_optimizer(optimizer)
            >>> scheduler = accelerator.prepare_scheduler(scheduler)
            >>> optimizer.step(), scheduler.step(), scheduler.get_last_lr()
            (None, None, [0.05])
        """
        return self._prepare_one("prepare_scheduler", scheduler, self._prepare_scheduler, None)

    def _prepare_one(
        self,
        method: str,
        obj: Any,
        prepare: Callable[[Any, torch.device | None], None],
        device_placement: bool | None,
    ) -> Any:
        self._refuse_others([obj])
        if self._find(obj) is None:
            place = self.device_placement if device_placement is None else device_placement
            prepare(obj, self.device if place else None)
        found = self._find(obj)
        if found is None:
            raise UsageError(
                f"{method}() got a {type(obj).__name__}",
                where=f"the script's {method}(...)",
                fix="pass an object of torch's own class for it, or of one derived from that",
            )
        return found

    def _prepare_model(
        self, model: Any, device: torch.device | None, *, trains: bool = True
    ) -> None:
        if isinstance(model, torch.nn.Module):
            if self.verify_device_map(model):
                raise UsageError(
                    f"{type(model).__name__} is spread over several devices by a device_map",
                    where="the script's prepare(...)",
                    fix="load the model without device_map; prepare() moves it to this rank's GPU",
                )
            prepared = self._strategy.prepare_model(model, self._precision, device, trains=trains)
            self._prepared.append((model, prepared))
            for one in self._all(PreparedOptimizer):  # of an earlier prepare()
                self._strategy.rebind(one.optimizer)

    def _prepare_optimizer(self, optimizer: Any, device: torch.device | None) -> None:
        if isinstance(optimizer, torch.optim.Optimizer):
            self._strategy.rebind(optimizer)
            prepared = PreparedOptimizer(
                optimizer,
                device is not None,
                accumulation=self._accumulation,
                precision=self._precision,
                token_mean=self._token_mean,
            )
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
                self._with_its_batch_size(loader),
                self._strategy.data_rank,
                self._strategy.data_size,
                config=self._data,
                device=device,
                before_pass=self._before_pass(),
                seed=self._seed,
            )
            self._prepared.append((loader, prepared))

    def _with_its_batch_size(self, loader: DataLoader[Any]) -> Any:
        size = self._global_batch_size
        if size is None:
            return loader
        steps = self._accumulation.steps
        return with_micro_batch(loader, micro_batch_of(size, self._strategy.data_size, steps))

    def _before_pass(self) -> Callable[[], None] | None:
        """Return what gives all ranks equal generators; None: loaders see to their own samplers."""
        types = [one for one in self.rng_types if one is not RNGType.GENERATOR]
        return partial(synchronize_rng_states, types) if types else None

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects, free what they held, and begin a new accumulation.

        Returns:
            A None for each of `objects`: `model, optimizer = accelerator.free_memory(model, ...)`.

        Examples:
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> batch = torch.ones(4, 2)
            >>> model, batch = accelerator.free_memory(model, batch)
            >>> accelerator.clear()  # the same, by another name
            []
        """
        self._prepared.clear()
        self._accumulation.reset()
        self._token_mean.reset()
        freed = [None] * len(objects)
        del objects
        clear_device_cache(garbage_collection=True)
        return freed

    clear = free_memory
