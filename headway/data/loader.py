"""A prepared data loader: this rank's share of every global batch, on its device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from headway.collectives import is_on, send_to_device
from headway.contract.records import beat, channel
from headway.data.active_loader import LoaderLoop
from headway.data.sharding import share_of
from headway.errors import UsageError


class PreparedDataLoader(DataLoader[Any]):
    """The script's loader, of which each rank reads its own share.

    Rank r of w gets batches r, r + w, ... (with `split_batches`: the r-th part of every batch). All
    ranks get equally many batches of equally many samples: the last global batch, if it is
    not full, is shared out evenly, and up to w - 1 samples from the epoch's beginning are repeated.
    So the mean over ranks of mean losses is the mean over the samples. `gather_for_metrics` leaves
    the repeated samples out again. `drop_last` drops that batch instead, for models that cannot use
    a small share of it, such as a BatchNorm that gets a single sample.

    The batches of a batch sampler without `batch_size` keep the sizes that it gave them.

    Shuffling (torch's `RandomSampler`) draws the same permutation on all ranks, and the same as one
    process would with the same seed. Another sampler that has a `generator` attribute draws from an
    equal one on all ranks; one that has none must agree by its own seed. A stream
    (`IterableDataset`) is read in full by every rank, and must be the same on all of them.

    Each pass calls `set_epoch()` of the sampler, batch sampler and data set, where they have one.
    It counts from 0, or from the loader's own last `set_epoch()`.

    All other attributes (`dataset`, `batch_size`, `sampler`, ...) are those of the script's loader,
    and cannot be set here.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        rank: int = 0,
        num_ranks: int = 1,
        *,
        split_batches: bool = False,
        device: torch.device | None = None,
    ) -> None:
        # no super().__init__: the attributes are those of `loader`, the batches those of `_share`
        if device is not None and device.type == "mps":
            loader.pin_memory = False  # torch could not either, and would warn in every epoch
        self._original = loader
        self._share = share_of(loader, rank, num_ranks, split_batches)
        self._device = device
        self._epoch = 0  # of the next pass

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.set_epoch(self._epoch)
        self._epoch += 1
        loop, device = LoaderLoop(self), self._device
        try:
            items, unpack = self._share.begin()
            channel.phase = "data"
            following = next(items, _END)
            while following is not _END:
                batch, global_batch = unpack(following)
                channel.phase = "data"
                if channel.fd is not None:
                    beat()
                following = next(items, _END)  # one batch ahead
                channel.phase = "script"
                loop.begin_batch(global_batch, is_last=following is _END)
                if device is not None and not is_on(batch, device):
                    batch = send_to_device(batch, device, non_blocking=device.type == "cuda")
                yield batch
        finally:
            channel.phase = "script"
            loop.end()

    def __len__(self) -> int:
        return len(self._share)

    def set_epoch(self, epoch: int) -> None:
        """Number the next pass `epoch`, for all that draw or order samples."""
        self._epoch = epoch
        loader = self._original
        inner = getattr(loader.batch_sampler, "sampler", None)
        sources = (loader.sampler, loader.batch_sampler, inner, loader.dataset)
        for source in {id(one): one for one in sources}.values():
            if callable(getattr(source, "set_epoch", None)):
                source.set_epoch(epoch)  # type: ignore[union-attr]

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


_END = object()
