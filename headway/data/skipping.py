"""Data loaders without their first batches, to resume in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from headway.data.loader import PreparedDataLoader
from headway.data.sharding import is_plain, without_first
from headway.errors import UsageError


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader that leaves out the first batches of each pass.

    The samples of a map data set that are left out are not loaded, only drawn; those of a stream
    are read. A pass over it counts as one of the given loader, whose next pass has the next epoch.

    Args:
        dataloader: a prepared loader, or any other.
        num_batches: batches of this rank to leave out.

    >>> from torch.utils.data import DataLoader
    >>> [batch.tolist() for batch in skip_first_batches(DataLoader(range(6), batch_size=2), 2)]
    [[4, 5]]
    """
    if not isinstance(num_batches, int) or isinstance(num_batches, bool) or num_batches < 0:
        raise UsageError(
            f"num_batches is {num_batches!r}, not a whole number of at least 0",
            where="the script's skip_first_batches(...)",
            fix="pass how many batches of the epoch each rank has trained on",
        )
    if isinstance(dataloader, PreparedDataLoader):
        return dataloader.without_first(num_batches)
    if is_plain(dataloader) and not isinstance(dataloader.dataset, IterableDataset):
        return without_first(dataloader, num_batches)
    return _WithoutFirst(dataloader, num_batches)


class _WithoutFirst(DataLoader[Any]):
    """Another loader, read from its beginning."""

    _loader: Any
    _num_batches: int

    def __init__(self, loader: Any, num_batches: int) -> None:
        # no super().__init__: the attributes are those of `loader`
        vars(self)["_loader"], vars(self)["_num_batches"] = loader, num_batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return islice(self._loader, self._num_batches, None)

    def __len__(self) -> int:
        return max(0, len(self._loader) - self._num_batches)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # copy and pickle ask before there are attributes
            raise AttributeError(name)
        return getattr(self._loader, name)
