"""What prepared data loaders give to one of several ranks; see runtime_worker.py."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from headway import Accelerator
from headway.data.configuration import DataLoaderConfiguration
from headway.data.loader import PreparedDataLoader
from headway.errors import UsageError
from headway.utils import set_seed
from tests.distributed.this_rank import RANK, WORLD


class Numbers(Dataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(range(first, self.n, step))


class Buckets:
    """Batches of the script's own sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0], [1, 2], [3, 4, 5], [6], [7, 8]])

    def __len__(self) -> int:
        return 5


def metrics_of_several_rows_and_scalars() -> dict[str, Any]:
    """Flattened results (3 rows for each sample) and one scalar for each rank."""
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Numbers(17), batch_size=3))
    rows, scalars = [], []
    for batch in loader:
        rows += accelerator.gather_for_metrics(batch.repeat_interleave(3)).tolist()
        scalars.append(len(accelerator.gather_for_metrics(torch.tensor(0.5))))
    return {"rows": rows, "scalars": set(scalars) <= {WORLD}}


def worker_processes() -> dict[str, Any]:
    accelerator = Accelerator()
    seen: dict[str, Any] = {}
    for name, data in {"map": Numbers(11), "stream": Stream(11)}.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch advises on worker counts of small machines
            loader = DataLoader(data, batch_size=2, num_workers=2, persistent_workers=True)
            loader = accelerator.prepare(loader)
            seen[name] = [
                sorted(
                    one
                    for batch in loader
                    for one in accelerator.gather_for_metrics(batch).tolist()
                )
                for _ in range(2)
            ]
        seen[f"{name} attributes"] = [loader.num_workers, loader.batch_size, len(loader.dataset)]
        accelerator.free_memory()
        del loader
    return seen


def shards() -> dict[str, Any]:
    """What this rank itself gets."""
    accelerator = Accelerator()
    set_seed(RANK)  # the ranks disagree: a script without a seed
    loader = accelerator.prepare(DataLoader(Numbers(24), batch_size=2, shuffle=True))
    unseeded = [[one for batch in loader for one in batch.tolist()] for _ in range(2)]
    set_seed(5)
    loader = accelerator.prepare(DataLoader(Numbers(24), batch_size=2, shuffle=True))
    order = [accelerator.gather(batch).tolist() for batch in loader]
    own = torch.Generator()
    own.manual_seed(RANK)
    loader = DataLoader(Numbers(24), batch_size=2, shuffle=True, generator=own)
    own_generator = [one for batch in accelerator.prepare(loader) for one in batch.tolist()]
    batches = DataLoader(Numbers(24), batch_size=2)
    dropping = accelerator.prepare(DataLoader(Numbers(9), batch_size=2, drop_last=True))
    buckets = DataLoader(Numbers(9), batch_sampler=Buckets())
    return {
        "unseeded": unseeded,
        "order": [one for batch in order for one in batch],
        "own generator": own_generator,
        "batches": [batch.tolist() for batch in accelerator.prepare(batches)],
        "drop_last": [len(dropping), [batch.tolist() for batch in dropping]],
        "buckets": [batch.tolist() for batch in accelerator.prepare(buckets)],
    }


def refusals() -> dict[str, str]:
    """What each call that cannot work said."""
    sampler: Any = torch.utils.data.DistributedSampler(Numbers(8), num_replicas=WORLD, rank=RANK)
    loaders = {
        "twice": (Accelerator(), DataLoader(Numbers(8), sampler=sampler, batch_size=2)),
        "split": (Accelerator(split_batches=True), DataLoader(Numbers(8), batch_size=WORLD + 1)),
        "own iter": (
            Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False)),
            Loops(Numbers(8), batch_size=2),
        ),
    }
    said = {}
    for name, (accelerator, loader) in loaders.items():
        try:
            accelerator.prepare(loader)
        except UsageError as error:
            said[name] = str(error)
    return said


class Loops(DataLoader[int]):
    def __iter__(self) -> Any:
        return iter([1])


class ShortBatches:
    """Batches that may be shorter than their nominal size, in the middle of the epoch."""

    batch_size = 2

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2], [3, 4], [5, 6], [7], [8]])

    def __len__(self) -> int:
        return 6


class Unlike(IterableDataset[Any]):
    """A stream that is another one on each rank."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        if self.kind == "samples":
            return iter(range(RANK, 12 + RANK))
        if self.kind == "tensors":
            return iter([torch.full((3,), float(RANK))] * 12)
        if self.kind == "later samples":
            return iter([*range(7), *range(100 * RANK, 100 * RANK + 12)])
        return iter(range(12 if RANK else 40))


def repeated_losses() -> dict[str, list[int]]:
    """How many losses an epoch of 21 samples gives in the idiom of transformers' run_clm."""
    seen = {}
    for name, data in {"map": Numbers(21), "stream": Stream(21), "few": Numbers(2)}.items():
        accelerator = Accelerator()
        counts = [0, 0, 0]
        for batch in accelerator.prepare(DataLoader(data, batch_size=4)):
            loss = torch.tensor(0.5)
            gather = accelerator.gather_for_metrics
            counts[0] += len(gather(loss.repeat(4)))
            counts[1] += len(gather(batch.repeat_interleave(4)))  # four results for a sample
            counts[2] += len(gather([0.5] * 4, use_gather_object=True))
        seen[name] = counts
    return seen


def metrics_of_uneven_rounds() -> dict[str, list[int]]:
    """Each sample once, whatever the sizes of the batches and whoever else reads the loader."""
    accelerator, other = Accelerator(), Accelerator()
    samplers: dict[str, Any] = {"short": ShortBatches(), "buckets": Buckets()}
    seen: dict[str, list[int]] = {}
    for name, sampler in samplers.items():
        loader = accelerator.prepare(DataLoader(Numbers(9), batch_sampler=sampler))
        seen[name] = [
            one for batch in loader for one in accelerator.gather_for_metrics({"x": batch})["x"]
        ]
        seen[name] = [int(one) for one in seen[name]]
    loader = accelerator.prepare(DataLoader(Numbers(9), batch_size=2))
    seen["nested"], seen["other"] = [], []
    for batch in loader:
        for _ in loader:
            pass
        seen["nested"] += accelerator.gather_for_metrics(batch).tolist()
        seen["other"] += other.gather_for_metrics(batch).tolist()
    return seen


def unlike_streams() -> list[str]:
    """What ranks that read different streams are told; alike ones in worker processes are read."""
    said = []
    for kind in ("samples", "tensors", "later samples", "lengths"):
        try:
            for _ in Accelerator().prepare(DataLoader(Unlike(kind), batch_size=2)):
                pass
            said.append("")
        except UsageError as error:
            said.append(str(error))
    return said


def sampler_is_left_as_it_was() -> bool:
    loader = DataLoader(Numbers(6), shuffle=True)
    for _ in Accelerator().prepare(loader):
        pass
    return getattr(loader.sampler, "generator", 0) is None


class Streamed:
    """Iterates over batches, and is no DataLoader."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for first in range(0, 10, 2):
            yield {"x": torch.arange(first, first + 2) + 100 * RANK, "name": f"from {RANK}"}


def dispatched() -> dict[str, Any]:
    """What this rank gets of data that differ between ranks, and that rank 0 alone reads."""
    config = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = Accelerator(dataloader_config=config)
    seen: dict[str, Any] = {}
    own = PreparedDataLoader(Streamed(), RANK, WORLD, device=accelerator.device)
    seen["objects"] = [[batch["name"], batch["x"].tolist()] for batch in own]
    unlike = accelerator.prepare(DataLoader(Unlike("samples"), batch_size=2))
    seen["stream"] = [batch.tolist() for batch in unlike]
    set_seed(RANK)
    shuffled = accelerator.prepare(DataLoader(Numbers(12), batch_size=2, shuffle=True))
    seen["shuffled"] = [batch.tolist() for batch in shuffled]
    texts = DataLoader(Numbers(7), batch_size=2, collate_fn=lambda rows: [str(one) for one in rows])
    seen["texts"] = [
        one for batch in accelerator.prepare(texts) for one in accelerator.gather_for_metrics(batch)
    ]
    skipped = accelerator.skip_first_batches(accelerator.prepare(texts), 1)
    seen["skipped"] = [len(skipped), sum(1 for _ in skipped)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises on worker counts of small machines
        workers = DataLoader(Numbers(8), batch_size=2, num_workers=1)
        seen["workers"] = [batch.tolist() for batch in accelerator.prepare(workers)]
    return seen


def seeded_orders_of_unseeded_ranks() -> list[int]:
    """This rank's samples where only rank 0's seed may count."""
    set_seed(RANK)
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    loader = DataLoader(Numbers(12), batch_size=2, shuffle=True)
    prepared = Accelerator(dataloader_config=config).prepare(loader)
    return [one for batch in prepared for one in batch.tolist()]
