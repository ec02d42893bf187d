"""What the prepared loaders of `headway.compat.data_loader` have in common."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler

from headway.data.loader import PreparedDataLoader
from headway.errors import UsageError


class AcceleratedDataLoader(PreparedDataLoader):
    """A prepared loader that counts its passes as Accelerate does.

    A pass counts once it has come to its end; one without its first batches is not counted by the
    loader that it was made of.
    """

    remainder = -1
    """The samples of the last global batch, if it is not full, in a pass."""

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
