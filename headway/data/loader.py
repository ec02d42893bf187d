"""A prepared data loader: this rank's share of every global batch, on its device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from headway.collectives import is_on, send_to_device
from headway.contract.records import beat, channel
from headway.data.active_loader import LoaderLoop
from headway.data.choice import share_of
from headway.data.configuration import DataLoaderConfiguration
from headway.data.samplers import with_seedable_sampler
from headway.data.sharding import NoBatch, batch_size_of
from headway.data.transfer import copied_ahead
from headway.errors import UsageError


class PreparedDataLoader(DataLoader[Any]):
    """The script's loader, of which each rank reads its own share.

    Rank r of w gets batches r, r + w, ... (with `split_batches`: the r-th part of every batch). All
    ranks get equally many batches of equally many samples: the last global batch, if it is
    not full, is shared out evenly, and up to w - 1 samples from the epoch's beginning are repeated.
    So the mean over ranks of mean losses is the mean over the samples. `gather_for_metrics` leaves
    the repeated samples out again. `drop_last` drops that batch instead, for models that cannot use
    a small share of it, such as a BatchNorm that gets a single sample. With `even_batches=False`
    nothing is repeated: the last global batch gives each rank a batch while there are some.

    The batches of a batch sampler without `batch_size` keep the sizes that it gave them.

    Shuffling (torch's `RandomSampler`) draws the same permutation on all ranks, and the same as one
    process would with the same seed. Another sampler that has a `generator` attribute draws from an
    equal one on all ranks; one that has none must agree by its own seed. A stream
    (`IterableDataset`) is read in full by every rank, and must be the same on all of them.

    With `dispatch_batches`, and for a loader with an `__iter__` of its own, rank 0 alone reads, and
    sends each rank its share. The batches of such an `__iter__` keep their sizes: where the last
    ones are fewer than the ranks, other ranks get one from the beginning again.

    Each pass calls `set_epoch()` of the sampler, batch sampler and data set, where they have one.
    It counts from 0, or from the loader's own last `set_epoch()`.

    All other attributes (`dataset`, `batch_size`, `sampler`, ...) are those of the script's loader,
    and cannot be set here.

    Attributes:
        end_of_dataloader: whether the latest pass has come to its last batch.
    """

    end_of_dataloader: bool

    def __init__(
        self,
        loader: Any,
        rank: int = 0,
        num_ranks: int = 1,
        *,
        config: DataLoaderConfiguration | None = None,
        device: torch.device | None = None,
    ) -> None:
        # no super().__init__: the attributes are those of `loader`, the batches those of `_share`
        config = config or DataLoaderConfiguration()
        if device is not None and device.type == "mps":
            loader.pin_memory = False  # torch could not either, and would warn in every epoch
        if config.use_seedable_sampler and isinstance(loader, DataLoader):
            loader = with_seedable_sampler(loader, config.data_seed)
        pinned = config.non_blocking or getattr(loader, "pin_memory", False)
        self._original = loader
        self._of_rank = (rank, num_ranks, config)
        self._share = share_of(loader, rank, num_ranks, config)
        self._device = device
        self._copies_to = device if pinned and device and device.type == "cuda" else None
        self._passes = _Passes()
        vars(self)["end_of_dataloader"] = False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.set_epoch(self._passes.following)
        self._passes.following += 1
        loop, device, state = LoaderLoop(self), self._device, vars(self)
        state["end_of_dataloader"] = False
        try:
            items, unpack = self._share.begin()
            if self._copies_to:  # pragma: needs a GPU
                items, unpack = copied_ahead(items, unpack, self._copies_to)
            channel.phase = "data"
            following = next(items, _END)
            while following is not _END:
                batch, global_batch = unpack(following)
                channel.phase = "data"
                if channel.fd is not None:
                    beat()
                following = next(items, _END)  # one batch ahead
                channel.phase = "script"
                if following is _END:
                    state["end_of_dataloader"] = True
                if batch is NoBatch:
                    continue
                loop.begin_batch(global_batch, is_last=following is _END)
                if device is not None and not is_on(batch, device):
                    batch = send_to_device(batch, device, non_blocking=device.type == "cuda")
                yield batch
        finally:
            channel.phase = "script"
            loop.end()

    def without_first(self, batches: int) -> PreparedDataLoader:
        """Return this loader without the first batches of each pass; see `skip_first_batches`."""
        other = copy.copy(self)
        other._share = share_of(self._original, *self._of_rank, skip=batches)
        return other

    @property
    def total_batch_size(self) -> int:
        """The number of samples in a full batch of all ranks together; 0 if that is not known."""
        _, num_ranks, config = self._of_rank
        return batch_size_of(self._original) * (1 if config.split_batches else num_ranks)

    @property
    def total_dataset_length(self) -> int:
        """The number of samples in the data set; TypeError if it has no length."""
        return len(self._original.dataset)

    @property
    def remainder(self) -> int:
        """The number of samples in the last global batch if it is not full, or 0; -1 if unknown."""
        if not self.total_batch_size or getattr(self._original, "drop_last", False):
            return -1
        try:
            return self.total_dataset_length % self.total_batch_size
        except (AttributeError, TypeError):
            return -1

    def __len__(self) -> int:
        return len(self._share)

    def set_epoch(self, epoch: int) -> None:
        """Number the next pass `epoch`, for all that draw or order samples."""
        self._passes.following = epoch
        loader = self._original
        names = ("sampler", "batch_sampler", "dataset")
        sources = [getattr(loader, name, None) for name in names]
        sources += [getattr(source, "sampler", None) for source in sources[:2]]
        for source in {id(one): one for one in sources}.values():
            set_epoch = getattr(source, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        if "_original" not in self.__dict__:  # copy and pickle ask before there are attributes
            raise AttributeError(name)
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and hasattr(self._original, name):
            raise UsageError(
                f"{name} of a prepared DataLoader cannot be changed",
                where=f"the script's assignment to .{name}",
                fix=f"set {name} before prepare(), or prepare a new DataLoader",
            )
        super().__setattr__(name, value)


class _Passes:
    """Counts the passes over a loader, with and without its first batches."""

    following = 0  # the number of the next one


_END = object()
