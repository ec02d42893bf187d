"""Accelerate's prepared loaders: what all of them have in common, and the dispatched one.

For that one rank 0 joins whole batches, and cuts them into equal parts.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from headway.data.active_loader import GlobalBatch, current_loop
from headway.data.configuration import DataLoaderConfiguration
from headway.data.dispatch import DispatchedShare, Parts
from headway.data.loader import PreparedDataLoader
from headway.data.position import FRESH, Division, Pass, Start
from headway.data.samplers import changed
from headway.data.sharding import Unpack, batch_size_of, source_of, without_first
from headway.distributed.nested import concatenate, find_batch_size, for_each_tensor, slice_tensors
from headway.distributed.world import rank_and_size
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


class DataLoaderDispatcher(AcceleratedDataLoader):
    """A DataLoader that rank 0 alone reads; it sends each rank its part of every batch.

    The batches of a round are joined and cut into parts of equal size. The last part is filled up
    with the first samples of the pass. So batches have to be tensors, alone or nested, of shapes
    that can be joined.

    Args:
        dataset: as for `torch.utils.data.DataLoader`, which also takes `kwargs`.
        split_batches: divide each batch among the ranks, instead of as many batches as ranks.
        skip_batches: batches to leave out at the beginning of each pass.
        use_stateful_dataloader: see `AcceleratedDataLoader`.
        slice_fn: returns the samples that a slice means:
            `slice_fn(batch, slice, process_index=..., num_processes=...)`.
        torch_device_mesh: refused.
        iteration: the number of the first pass.
    """

    _share: JoinedShare

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        device: torch.device | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_mesh(torch_device_mesh)
        config = DataLoaderConfiguration(
            split_batches=split_batches,
            dispatch_batches=True,
            non_blocking=_non_blocking,
            use_stateful_dataloader=use_stateful_dataloader,
        )
        rank, num_ranks = rank_and_size()
        super().__init__({"dataset": dataset, **kwargs}, config, rank, num_ranks, device=device)
        self.split_batches = split_batches
        self.skip_batches = skip_batches
        self._drop_last = _drop_last
        self._passes.following = iteration
        division = Division(num_ranks, split_batches)
        self._share = JoinedShare(
            self._original, rank, division, skip_batches, _drop_last, slice_fn or slice_tensors
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        vars(self)["remainder"] = -1
        for batch in self._one_pass():
            if self.end_of_dataloader:
                vars(self)["remainder"] = current_loop().batch.samples
            yield batch

    def without_first(self, batches: int) -> DataLoaderDispatcher:
        """Return this loader without the first batches of each pass.

        Of a map data set these are batches that rank 0 reads, not rounds: on several ranks fewer
        samples are left out than the ranks have got by as many batches.
        """
        return self._with_share(self._share.without_first(batches), batches)

    @contextmanager
    def sharing_evenly(self, even_batches: bool) -> Iterator[None]:
        """Change nothing: batches are always cut into equal parts."""
        warn_of_even_batches()
        yield


class JoinedShare(DispatchedShare):
    """The rank's part of rounds that rank 0 joins from whole batches."""

    _leaves_out_itself = False  # the loader: the first batches of every pass

    def __init__(
        self,
        loader: DataLoader[Any],
        rank: int,
        division: Division,
        skip: int,
        drop_last: bool,
        part_of: Callable[..., Any],
    ) -> None:
        self._loader, self._rank, self._division = loader, rank, division
        self._num_ranks = division.num_ranks
        self._skip, self._drop_last, self._part_of = skip, drop_last, part_of

    @property
    def lookahead(self) -> None:
        return None  # the next round is read before a batch is given, as there

    def without_first(self, batches: int) -> JoinedShare:
        """Return this share without the first batches of each pass."""
        other = copy.copy(self)
        if isinstance(self._loader.dataset, IterableDataset):
            other._skip = batches
        else:
            other._loader, other._leaves_out_itself = without_first(self._loader, batches), True
        return other

    def begin(self, start: Start = FRESH) -> tuple[Iterator[Any], Unpack]:
        if self._rank > 0:
            self._draw_what_reading_draws()
        return super().begin(start)

    def _draw_what_reading_draws(self) -> None:
        """Leave the random generators as they are where the loader is read, as there."""
        iter(changed(self._loader, num_workers=0))  # draws the workers' seed
        if self._loader.num_workers and not isinstance(self._loader.dataset, IterableDataset):
            next(iter(source_of(self._loader)), None)  # workers are given indices at once

    def _read(self, start: Start) -> Iterator[Parts]:
        skip = self._skip
        if start.taken is not None and not self._leaves_out_itself:
            skip = start.taken.batches // self._division.num_batches
        return islice(self._rounds_of(iter(self._loader)), skip, None)

    def _rounds_of(self, batches: Iterator[Any]) -> Iterator[Parts]:
        first = None
        while taken := list(islice(batches, self._division.num_batches)):
            if self._drop_last and len(taken) < self._division.num_batches:
                return
            batch = concatenate(taken)
            if first is None:
                first = self._part(batch, 0, self._num_ranks)
            yield self._cut(batch, first)

    def _cut(self, batch: Any, first: Any) -> Parts:
        """Divide a joined batch, with the first samples of the pass to fill it up with."""
        samples, ranks = find_batch_size(batch), self._num_ranks
        size, rest = divmod(samples, ranks)
        if rest and not self._drop_last:
            batch, size = concatenate([batch, first]), size + 1
        parts = [self._part(batch, rank, size) for rank in range(ranks)]
        full = batch_size_of(self._loader) * self._division.num_batches
        return parts, GlobalBatch(min(samples, size * ranks), size * ranks, full)

    def _part(self, batch: Any, rank: int, size: int) -> Any:
        samples = slice(rank * size, (rank + 1) * size)
        part = self._part_of(batch, samples, process_index=rank, num_processes=self._num_ranks)
        return for_each_tensor(torch.clone, part)  # a view would be sent with the whole batch

    def _count(self) -> int:
        return self._division.num_rounds(
            len(self._loader), self._division.num_batches, self._rank, self._drop_last
        )
