"""Prepared loaders, the loops over them that this process is in, and what batches are made of.

The loops belong to the process, not to an Accelerator: each of several finds the same batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from headway.distributed import collectives
from headway.distributed import nested as containers
from headway.distributed.world import rank_and_size
from headway.errors import UsageError


class TrainingLoader(DataLoader[Any]):
    """What a training asks of each loader that it has prepared, of whichever class.

    One that resumes at its position by itself is a PreparedDataLoader.
    """

    @property
    def epoch(self) -> int:
        """The number of the epoch that has begun and is not complete, or else of the next one."""
        raise NotImplementedError

    def sharing_evenly(self, even_batches: bool) -> AbstractContextManager[None]:
        """Share out evenly in the block, or not; see `DataLoaderConfiguration.even_batches`."""
        raise NotImplementedError

    def without_first(self, batches: int) -> Any:
        """Return this loader without the first batches of each pass; see `skip_first_batches`."""
        raise NotImplementedError

    def position(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        raise NotImplementedError

    def seek(self, position: dict[str, Any]) -> None:
        """Take over a position that another run has saved."""
        raise NotImplementedError


class GlobalBatch(NamedTuple):
    """How many samples one batch of all ranks together has; 0 where a number is unknown."""

    samples: int = 0  # different ones
    padded: int = 0  # with those that are repeated to give all ranks equally many
    full: int = 0  # in any batch but an epoch's last one, if as many ranks have a part of it
    shares: tuple[int, ...] = ()  # those of each rank that has any; empty if all have equally many
    repeated: int = 0  # of this rank's samples, the last ones, where it reads data of its own


class LoaderLoop:
    """One loop over a prepared data loader, as of its current batch."""

    def __init__(self, loader: Any = None) -> None:
        self.loader = loader
        self.batch = GlobalBatch()
        self.is_last = False  # whether the current batch is the last one
        self._num_gathers = 0  # for the current batch
        self._rows: dict[int, float] = {}  # n-th gather for a batch -> results for a sample

    def begin_batch(self, batch: GlobalBatch, *, is_last: bool) -> None:
        """Make `batch` the current one, and this loop the innermost."""
        self.batch, self.is_last, self._num_gathers = batch, is_last, 0
        if not _loops or _loops[-1] is not self:
            self.end()
            _loops.append(self)

    def end(self) -> None:
        """Leave the loop."""
        _loops[:] = [other for other in _loops if other is not self]

    def drop_repeats(self, gathered: Any, num_ranks: int) -> Any:
        """Return results of all ranks for the current batch without those of repeated samples.

        A result of the usual length for a batch that is shorter than usual
        (`loss.repeat(batch_size)`) is cut to the batch. Where a length can be understood either
        way, the number of results for a sample in the first batch decides. What is no list or
        tensor, in the order of the ranks, is returned as it is.
        """
        samples, padded, full, shares, _ = self.batch
        self._num_gathers += 1
        is_tensor = isinstance(gathered, torch.Tensor) and gathered.ndim > 0
        if not padded or not (is_tensor or isinstance(gathered, list)):
            return gathered
        entries = len(gathered)
        is_only_one = self.is_last and entries == full
        usual = self._rows.setdefault(self._num_gathers, 1 if is_only_one else entries / padded)
        if usual != int(usual):  # one result for a batch, or for anything else but samples
            return gathered
        rows = int(usual)
        if entries == rows * full > rows * padded:
            shares = shares or (padded // num_ranks,) * num_ranks
            starts = range(0, entries, entries // len(shares))
            kept = [
                start + one
                for start, share in zip(starts, shares, strict=True)
                for one in range(rows * share)
            ][: rows * samples]
            return gathered[kept] if is_tensor else [gathered[one] for one in kept]
        return gathered if entries % padded else gathered[: entries // padded * samples]


_loops: list[LoaderLoop] = []  # the innermost is the last
_NO_LOOP = LoaderLoop()


def current_loop() -> LoaderLoop:
    """Return the innermost loop over a prepared loader; outside all of them one without batch."""
    return _loops[-1] if _loops else _NO_LOOP


def open_loops() -> list[LoaderLoop]:
    """Return the loops that this process is in, from outside in."""
    return [*_loops]


def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
    """Gather results for samples of the current batch; see `Accelerator.gather_for_metrics`."""
    loop, size = current_loop(), rank_and_size()[1]

    def drop_repeats(gathered: Any) -> Any:
        return loop.drop_repeats(gathered, size)

    as_objects = use_gather_object or not containers.only_tensors(input_data)
    if as_objects:
        _check_one_for_each_sample(input_data)
    shares, repeated = loop.batch.shares, loop.batch.repeated
    if repeated:
        input_data = _without_last(input_data, repeated, shares[rank_and_size()[0]])
    if shares and len(shares) < size:
        gathered = collectives.gather_among_first(input_data, len(shares), as_objects)
    elif as_objects:
        gathered = collectives.gather_object(input_data)
    else:
        gathered = (collectives.gather_uneven if shares else collectives.gather)(input_data)
    if as_objects:
        return drop_repeats(gathered)
    return containers.for_each_tensor(drop_repeats, gathered)


def _without_last(data: Any, repeated: int, kept: int) -> Any:
    """Return results for samples without those for the repeated ones at their end."""

    def cut(rows: Any) -> Any:
        each, rest = divmod(len(rows), kept + repeated)
        return rows if rest else rows[: each * kept]

    if isinstance(data, list):
        return cut(data)
    return containers.for_each_tensor(lambda one: cut(one) if one.ndim else one, data)


def _check_one_for_each_sample(data: Any) -> None:
    """Raise UsageError if `data` does not hold one object for each sample."""
    if isinstance(data, (str, bytes, Mapping)) or not isinstance(data, Iterable):
        raise UsageError(
            f"gather_for_metrics() got a {type(data).__name__} with other things than tensors",
            where="the script's gather_for_metrics(...)",
            fix="call it for each entry: with tensors, or a list of one object for each sample",
        )
