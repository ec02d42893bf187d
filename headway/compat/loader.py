"""What the prepared loaders of `headway.compat.data_loader` have in common."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from headway.data.configuration import DataLoaderConfiguration
from headway.data.loader import PreparedDataLoader
from headway.data.position import Pass, Start
from headway.errors import UsageError
from headway.state import GradientState
from headway.training.availability import is_torchdata_stateful_dataloader_available


class AcceleratedDataLoader(PreparedDataLoader):
    """A prepared loader that makes the loader which it reads, and counts its passes as Accelerate.

    A pass counts once it has come to its end; one without its first batches is not counted by the
    loader that it was made of.

    With `use_stateful_dataloader` it is a StatefulDataLoader of torchdata by `isinstance`, where
    that is installed: it has its methods. The loader that is read is one as well, and gives its
    state, unless an Accelerator has prepared this one, which then keeps its place itself.

    Args:
        arguments: of the loader that is read.
    """

    remainder = -1
    """The samples of the last global batch, if it is not full, in a pass."""

    def __init__(
        self,
        arguments: dict[str, Any],
        config: DataLoaderConfiguration,
        rank: int = 0,
        num_ranks: int = 1,
        *,
        device: torch.device | None = None,
    ) -> None:
        kind = _stateful_class() if config.use_stateful_dataloader else DataLoader
        super().__init__(kind(**arguments), rank, num_ranks, config=config, device=device)
        self.use_stateful_dataloader = config.use_stateful_dataloader
        self.base_dataloader, self.gradient_state = self._original, GradientState()
        self._latest: Pass | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        is_stateful = vars(self).get("use_stateful_dataloader", False)
        return _stateful_class() if is_stateful else type(self)

    def state_dict(self) -> dict[str, Any]:
        """Return where the passes stand; of a StatefulDataLoader in the form of torchdata."""
        if self._stream is not self._original:
            return super().state_dict()
        state, latest = self._original.state_dict(), self._latest
        if latest is not None and not latest.is_complete:
            state = latest.stream  # before the batch that is read ahead
        return {**state, "_iterator_finished": self.end_of_dataloader}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass go on where `state_dict()` was called."""
        if self._stream is self._original:
            self._latest = None
            self._original.load_state_dict(state_dict)
        else:
            super().load_state_dict(state_dict)

    def _begin_pass(self) -> tuple[Start, Pass]:
        start, self._latest = super()._begin_pass()
        return start, self._latest

    @property
    def iteration(self) -> int:
        """The number of the pass: the current one, or the next one between passes."""
        return self._passes.following

    @property
    def epoch(self) -> int:
        current = self._passes.current  # which is counted at its end
        return self._passes.following + (current is not None and current.is_complete)

    @property
    def _next_number(self) -> int:
        return self.epoch

    def get_sampler(self) -> Any:
        """See `get_sampler`."""
        return get_sampler(self)

    def _one_pass(self) -> Iterator[Any]:
        epoch = self.iteration
        for batch in super().__iter__():
            self._passes.following = epoch
            yield batch
        is_counted = self.end_of_dataloader and not self._skipped  # not one without any batch
        self._passes.following = epoch + is_counted


def _stateful_class() -> type[DataLoader[Any]]:
    """Return torchdata's class of loaders that tell where they are; without torchdata torch's."""
    if not is_torchdata_stateful_dataloader_available():
        return DataLoader
    from torchdata.stateful_dataloader import StatefulDataLoader

    found: type[DataLoader[Any]] = StatefulDataLoader
    return found


def get_sampler(dataloader: Any) -> Any:
    """Return the sampler of a loader's samples; None if it has none."""
    is_nested = isinstance(dataloader.sampler, BatchSampler)
    batches = dataloader.sampler if is_nested else dataloader.batch_sampler
    return getattr(batches, "sampler", None)


def refuse_mesh(mesh: Any) -> None:
    """Raise UsageError if there is a `torch_device_mesh`."""
    if mesh is not None:
        raise UsageError(
            "torch_device_mesh is not supported",
            where="the script's data loader",
            fix="remove it: every rank reads its own share of the data",
        )


def warn_of_even_batches() -> None:
    """Warn that a loader cannot leave the last round uneven, as Accelerate does."""
    warnings.warn(
        "join_uneven_inputs(even_batches=...) is only supported for map-style datasets that every"
        " rank reads itself; it changes nothing of another loader that was prepared",
        UserWarning,
        stacklevel=2,
    )
