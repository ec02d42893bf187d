"""One rank of the runtime's tests: runs every check below, writes what it saw to FOLDER/RANK.json.

python tests/distributed/runtime_worker.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from headway import Accelerator
from headway.errors import UsageError
from headway.utils import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    set_seed,
)

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
FOLDER = Path(sys.argv[1])
CHECKS: list[Callable[[], Any]] = []


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS.append(function)
    return function


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


@check
def weights() -> dict[str, list[float]]:
    """Weights after three optimizer steps on global batches of 12 samples."""
    result = {}
    for accumulation in (1, 2):
        set_seed(7)
        accelerator = Accelerator(gradient_accumulation_steps=accumulation)
        model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        inputs, targets = torch.randn(36, 5), torch.randn(36, 1)
        loader = DataLoader(
            TensorDataset(inputs, targets), batch_size=12 // WORLD // accumulation, shuffle=True
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        result[str(accumulation)] = torch.cat([p.flatten() for p in model.parameters()]).tolist()
    return result


@check
def weights_after_an_uneven_batch() -> list[float]:
    """7 samples in one global batch of at most 12: all ranks must end alike."""
    set_seed(7)
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.randn(7, 2)), batch_size=12 // WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (x,) in loader:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
    return torch.cat([p.flatten() for p in model.parameters()]).tolist()


@check
def wrong_metrics() -> list[str]:
    """Every data set size, batch size and kind of loader whose gathered results were not exact."""
    wrong = []
    for n in range(1, 26):
        whole, split = Accelerator(), Accelerator(split_batches=True)
        for batch_size in (1, 2, 3, 8, 32):
            for kind in ("map", "split", "stream", "objects", "shuffled"):
                if batch_size == 1 and kind in ("objects", "shuffled"):
                    continue  # slow, and nothing new
                accelerator = split if kind == "split" else whole
                data: Any = Stream(n) if kind == "stream" else Numbers(n)
                size = batch_size * WORLD if kind == "split" else batch_size
                loader = DataLoader(data, batch_size=size, shuffle=kind == "shuffled")
                loader = accelerator.prepare(loader)
                seen: list[int] = []
                rounds = 0
                for batch in loader:
                    rounds += 1
                    objects = [int(one) for one in batch]
                    if kind == "objects":
                        seen += accelerator.gather_for_metrics(objects)
                    else:
                        seen += accelerator.gather_for_metrics({"x": [batch]})["x"][0].tolist()
                if len(loader) != rounds:
                    wrong.append(f"{kind} n={n} batch_size={batch_size} len={len(loader)}")
                if (sorted(seen) if kind == "shuffled" else seen) != list(range(n)):
                    wrong.append(f"{kind} n={n} batch_size={batch_size}: {seen}")
    return wrong


@check
def metrics_of_several_rows_and_scalars() -> dict[str, Any]:
    """Flattened results (3 rows for each sample) and one scalar for each rank."""
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Numbers(17), batch_size=3))
    rows, scalars = [], []
    for batch in loader:
        rows += accelerator.gather_for_metrics(batch.repeat_interleave(3)).tolist()
        scalars.append(len(accelerator.gather_for_metrics(torch.tensor(0.5))))
    return {"rows": rows, "scalars": set(scalars) <= {WORLD}}


@check
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


@check
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


@check
def schedule() -> dict[str, list[float]]:
    """Optimizer steps, scheduler steps and rate after an epoch of 10 batches in each rank."""
    result = {}
    for name, accumulation, split in (
        ("plain", 1, False),
        ("split", 1, True),
        ("3 of 10", 3, False),
    ):
        accelerator = Accelerator(split_batches=split, gradient_accumulation_steps=accumulation)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
        data = TensorDataset(torch.randn(10 * WORLD, 1))
        loader = DataLoader(data, batch_size=WORLD if split else 1)
        scheduler, loader, model, optimizer = accelerator.prepare(
            scheduler, loader, model, optimizer
        )
        due = []
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean() * 0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            due.append(accelerator.sync_gradients)
        result[name] = [
            sum(due),
            scheduler.last_epoch,
            round(scheduler.get_last_lr()[0], 6),
            due[-1],
        ]
    return result


@check
def gradients_while_accumulating() -> list[bool]:
    """Whether the ranks' gradients agree after each of five micro-batches, two to a step."""
    set_seed(RANK)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(
        torch.nn.Linear(3, 1), DataLoader(TensorDataset(torch.randn(5 * WORLD, 3)), batch_size=1)
    )
    agree = []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x + RANK).square().mean())
        gradients = accelerator.gather(next(model.parameters()).grad)
        agree.append(bool((gradients == gradients[:1]).all()))
        if accelerator.sync_gradients:
            model.zero_grad()
    return agree


@check
def collectives() -> dict[str, Any]:
    accelerator = Accelerator()
    one = torch.tensor([[RANK, RANK]])
    ragged = torch.ones(RANK + 1, 2)
    return {
        "gather": gather({"a": [one], "b": (torch.tensor(RANK),)})["a"][0].tolist(),
        "scalar": gather(torch.tensor(RANK)).tolist(),
        "objects": gather_object([f"rank {RANK}"]),
        "sum": accelerator.reduce(torch.tensor([1.0, RANK])).tolist(),
        "mean": reduce(torch.tensor(RANK)).item(),
        "scaled": reduce(torch.tensor(2), "sum", scale=0.5).item(),
        "broadcast": broadcast([torch.tensor(RANK)], from_process=WORLD - 1)[0].item(),
        "list": broadcast_object_list([f"rank {RANK}", RANK], from_process=WORLD - 1),
        "padded": pad_across_processes(ragged, pad_index=7).tolist(),
        "padded first": accelerator.pad_across_processes(ragged, pad_first=True)[0].tolist(),
        "untouched": pad_across_processes(torch.tensor(3.0), dim=1).item(),
    }


@check
def order_of_ranks() -> dict[str, Any]:
    accelerator = Accelerator()
    entered: list[float] = []
    with accelerator.main_process_first():
        entered.append(time.time())
        if accelerator.is_main_process:
            time.sleep(0.2)
            (FOLDER / f"first{WORLD}").touch()
        else:
            assert (FOLDER / f"first{WORLD}").exists()
    on_last = accelerator.on_process(lambda: RANK, process_index=WORLD - 1)
    accelerator.save({"rank": RANK}, FOLDER / f"saved{WORLD}.pt")
    accelerator.wait_for_everyone()
    return {
        "main": accelerator.on_main_process(lambda: RANK)(),
        "last": on_last(),
        "is last": accelerator.is_last_process,
        "saved": torch.load(FOLDER / f"saved{WORLD}.pt"),
        "type": accelerator.distributed_type == ("NO" if WORLD == 1 else "MULTI_CPU"),
        "place": [accelerator.process_index, accelerator.num_processes, str(accelerator.device)],
    }


@check
def refusals() -> dict[str, str]:
    """What each call that cannot work said."""
    sampler: Any = torch.utils.data.DistributedSampler(Numbers(8), num_replicas=WORLD, rank=RANK)
    loaders = {
        "twice": (Accelerator(), DataLoader(Numbers(8), sampler=sampler, batch_size=2)),
        "split": (Accelerator(split_batches=True), DataLoader(Numbers(8), batch_size=WORLD + 1)),
    }
    said = {}
    for name, (accelerator, loader) in loaders.items():
        try:
            accelerator.prepare(loader)
        except UsageError as error:
            said[name] = str(error)
    return said


if __name__ == "__main__":
    torch.set_num_threads(1)
    seen = {function.__name__: function() for function in CHECKS}
    (FOLDER / f"{WORLD}-{RANK}.json").write_text(json.dumps(seen))
    Accelerator().end_training()
    assert not torch.distributed.is_initialized()
