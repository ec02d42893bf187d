"""Streams of samples, which loader workers divide among themselves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info


class Stream(IterableDataset[Any]):
    """Yields samples in their order."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return islice(self.samples, first, None, step)


class SizedStream(Stream):
    """A stream that has a length."""

    def __len__(self) -> int:
        return len(self.samples)


class StatefulStream(Stream):
    """A stream that continues where its state says."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.samples):
            self.at += 1
            yield self.samples[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]
