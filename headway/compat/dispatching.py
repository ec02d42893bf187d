"""Accelerate's dispatched loaders: rank 0 joins whole batches, and cuts them into equal parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from headway.compat.loader import AcceleratedDataLoader, refuse_mesh, warn_of_even_batches
from headway.data.active_loader import GlobalBatch, current_loop
from headway.data.configuration import DataLoaderConfiguration
from headway.data.dispatch import DispatchedShare, Parts
from headway.data.position import FRESH, Division, Start
from headway.data.samplers import changed
from headway.data.sharding import Unpack, batch_size_of, source_of, without_first
from headway.distributed.nested import concatenate, find_batch_size, for_each_tensor, slice_tensors
from headway.distributed.world import rank_and_size


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
