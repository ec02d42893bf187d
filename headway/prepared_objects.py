"""What a rank has prepared: finds it, gives it back as it was, and says how it is spread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from headway.models import extract_model_from_parallel
from headway.process import Group
from headway.strategies.strategy import Strategy
from headway.world import DistributedType, World


class PreparedObjects(Group):
    """A rank that remembers a script's objects, and what they were prepared as."""

    def __init__(self, world: World, strategy: Strategy) -> None:
        super().__init__(world)
        self._strategy = strategy
        self._prepared: list[tuple[Any, Any]] = []  # the script's object, and ours

    @property
    def distributed_type(self) -> DistributedType:
        """How the ranks work together."""
        return DistributedType.FSDP if self._strategy.shards else super().distributed_type

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded, by `torch.distributed.fsdp.fully_shard`."""
        return self._strategy.shards

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return whether `model` was spread over several devices by a `device_map`.

        Examples:
            >>> accelerator.verify_device_map(torch.nn.Linear(2, 1))
            False
        """
        return any(len(getattr(one, "hf_device_map", ())) > 1 for one in model.modules())

    def _find(self, obj: Any) -> Any:
        """Return what `obj` was prepared as; None if it was not."""
        pairs = (pair for pair in self._prepared if obj is pair[0] or obj is pair[1])
        return next(pairs, (None, None))[1]

    def _all(self, kind: type[Any]) -> list[Any]:
        return [prepared for _, prepared in self._prepared if isinstance(prepared, kind)]

    def _trained_parameters(self) -> Iterator[torch.Tensor]:
        for model in self._all(torch.nn.Module):
            yield from model.parameters()

    def unwrap_model(
        self,
        model: torch.nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> torch.nn.Module:
        """Return the model inside DistributedDataParallel or DataParallel, as it was prepared.

        One that was compiled since stays compiled.

        Args:
            keep_fp32_wrapper: let the model go on computing under autocast.
            keep_torch_compile: return a compiled model as such.

        Examples:
            >>> model = torch.nn.Linear(2, 1)
            >>> accelerator.unwrap_model(accelerator.prepare(model)) is model
            True
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def empty_init(self) -> AbstractContextManager[Any]:
        """Return a context in which models are made without memory for their weights.

        Only where the strategy shards them: `prepare` then initialises one unit after the other by
        the `reset_parameters()` of its modules, or takes what rank 0 has loaded since. With other
        strategies models are made as ever.

        Examples:
            >>> with accelerator.empty_init():
            ...     model = torch.nn.Linear(2, 1)
            >>> accelerator.prepare(model).weight.shape
            torch.Size([1, 2])
        """
        return self._strategy.empty_init()

    @contextmanager
    def whole(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """Give the model that `prepare` was given, with weights that this rank reads in full.

        Where the model is sharded, every rank has to enter the context, and what is written to
        the weights in it is lost.

        Examples:
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> with accelerator.whole(model) as inner:
            ...     inner.weight.shape
            torch.Size([1, 2])
        """
        inner = self.unwrap_model(model, keep_torch_compile=False)
        with self._strategy.whole(inner):
            yield inner
