"""What a save, a resumption and a batch cost as things grow, beside plain PyTorch, in one run.

    python benchmarks/growth.py                     # all tables
    python benchmarks/growth.py --only samples      # one table
    python benchmarks/growth.py --json result.json

In one process, in CPU time of all its threads, so that disks and other programs do not count:

1. parameters: a model of 10 to 5,000 of them and its AdamW, saved and loaded by torch.save, by
   torch.distributed.checkpoint (DCP) and by Headway;
2. checkpoints: `save_state` into a folder that has 1 or 500;
3. loaders: `save_state` with 1 or 50 prepared ones, and the bytes of each;
4. samples: the first batch of a shuffled epoch, torch's and Headway's, and the first one of a run
   that resumes in the middle; each batch of a loader with and without `Accelerator(seed=)`;
5. background: a training step of 1,000 small parameters while a thread writes a checkpoint, in
   wall time, beside the 80 steps around it;
6. steps: memory, descriptors and threads after 2,000 to 20,000 steps.

Contenders take turns. Printed are medians, and the median ratio to the first of the table.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.utils.data import DataLoader, Dataset, TensorDataset

from headway import Accelerator

Action = Callable[[], object]


class Row(NamedTuple):
    """One contender of a table."""

    table: str
    contender: str
    seconds: float
    ratio: float  # to the first contender, in the same round


def in_turns(table: str, actions: dict[str, Action], rounds: int) -> list[Row]:
    """Return a row for each action; the first round warms the caches."""
    taken: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            gc.collect()
            begin = time.process_time()
            actions[name]()
            taken[name].append(time.process_time() - begin)
    rows = []
    for name, runs in taken.items():
        pairs = zip(runs[1:], taken[names[0]][1:], strict=True)
        ratio = statistics.median(pair / max(first, 1e-9) for pair, first in pairs)
        rows.append(Row(table, name, statistics.median(runs[1:]), ratio))
    print(f"\n{table:<32}{'CPU time':>12}{'ratio':>8}")
    for row in rows:
        print(f"{row.contender:<32}{row.seconds * 1e3:>9.2f} ms{row.ratio:>8.2f}", flush=True)
    return rows


def trained(parameters: int) -> tuple[Any, Any]:
    """Return a model of that many small parameters, and its AdamW after a step."""
    model = torch.nn.ParameterList(torch.randn(100) for _ in range(parameters))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def accelerator_of(model: Any, optimizer: Any, **options: Any) -> Accelerator:
    accelerator = Accelerator(cpu=True, **options)
    accelerator.prepare(model, optimizer)
    return accelerator


def parameters(folder: Path, rounds: int) -> list[Row]:
    rows = []
    for count in (10, 100, 1000, 5000):
        model, optimizer = trained(count)
        accelerator = accelerator_of(model, optimizer)
        path = folder / str(count)

        def state(model: Any = model, optimizer: Any = optimizer) -> dict[str, Any]:
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

        def load_dcp(path: Path = path, state: Any = state, optimizer: Any = optimizer) -> None:
            loaded = state()
            load(loaded, checkpoint_id=path / "dcp")
            optimizer.load_state_dict(loaded["optimizer"])

        path.mkdir()
        saves: dict[str, Action] = {
            "DCP": lambda path=path, state=state: save(state(), checkpoint_id=path / "dcp"),  # type: ignore[misc]
            "torch.save": lambda path=path, state=state: torch.save(state(), path / "torch"),  # type: ignore[misc]
            "headway": lambda path=path, one=accelerator: one.save_state(path / "headway"),  # type: ignore[misc]
        }
        loads: dict[str, Action] = {
            "DCP": load_dcp,
            "torch.load": lambda path=path: torch.load(path / "torch"),  # type: ignore[misc]
            "headway": lambda path=path, one=accelerator: one.load_state(path / "headway"),  # type: ignore[misc]
        }
        rows += in_turns(f"save {count:,} parameters", saves, rounds)
        rows += in_turns(f"load {count:,} parameters", loads, rounds)
    return rows


def checkpoints(folder: Path, rounds: int) -> list[Row]:
    actions: dict[str, Action] = {}
    for count in (1, 500):
        model, optimizer = trained(1)
        accelerator = accelerator_of(model, optimizer)
        for number in range(count):
            accelerator.save_state(folder / str(count) / f"checkpoint_{number}")
        last = folder / str(count) / "last"
        actions[f"beside {count}"] = lambda last=last, one=accelerator: one.save_state(last)  # type: ignore[misc]
    return in_turns("save beside other checkpoints", actions, rounds)


def loaders(folder: Path, rounds: int) -> list[Row]:
    actions: dict[str, Action] = {}
    samples = TensorDataset(torch.randn(64, 1))
    for count in (1, 50):
        accelerator = accelerator_of(*trained(1))
        for loader in [accelerator.prepare(DataLoader(samples, 8, True)) for _ in range(count)]:
            next(iter(loader))
        path = folder / str(count)
        actions[f"{count}"] = lambda path=path, one=accelerator: one.save_state(path)  # type: ignore[misc]
    rows = in_turns("save with loaders", actions, rounds)
    sizes = [
        sum(path.stat().st_size for path in (folder / name).rglob("*") if path.is_file())
        for name in actions
    ]
    each = (sizes[1] - sizes[0]) / 49
    print(f"a loader adds {each:.0f} bytes, {(rows[1].seconds - rows[0].seconds) / 49e-3:.2f} ms")
    return rows


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


def samples(folder: Path, rounds: int) -> list[Row]:
    rows = []
    for count in (10**3, 10**5, 10**7):
        plain = DataLoader(Numbers(count), 8, shuffle=True)
        prepared = Accelerator(cpu=True).prepare(plain)
        other = Accelerator(cpu=True).prepare(DataLoader(Numbers(count), 8, shuffle=True))
        batches = iter(prepared)
        for _ in range(100):
            next(batches)
        middle = prepared.state_dict()
        middle["place"][1] = count // 16 * 8

        def resumed(other: Any = other, middle: Any = middle) -> None:
            other.load_state_dict(middle)
            next(iter(other))

        actions: dict[str, Action] = {
            "pytorch": lambda plain=plain: next(iter(plain)),  # type: ignore[misc]
            "headway": lambda one=prepared: next(iter(one)),  # type: ignore[misc]
            "headway, resumed": resumed,
        }
        rows += in_turns(f"first of {count:,} samples", actions, rounds)
    loader = DataLoader(Numbers(4000), 8, shuffle=True)
    one, seeded = Accelerator(cpu=True), Accelerator(cpu=True, seed=1)
    walks = {"pytorch": loader, "headway": one.prepare(loader), "seed=": seeded.prepare(loader)}
    actions = {name: lambda walked=walked: [*walked] for name, walked in walks.items()}  # type: ignore[misc]
    return rows + in_turns("500 batches", actions, rounds)


def background(folder: Path, rounds: int) -> list[Row]:
    model, optimizer = trained(1000)
    accelerator = accelerator_of(model, optimizer)
    number = 0

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def start_torch(path: Path) -> Callable[[], bool]:
        writer = threading.Thread(target=torch.save, args=(deepcopy(state()), path))
        writer.start()
        return writer.is_alive

    def start_dcp(path: Path) -> Callable[[], bool]:
        written: Any = async_save(state(), checkpoint_id=path)
        return lambda: not written.done()

    def start_headway(path: Path) -> Callable[[], bool]:
        before = {*threading.enumerate()}
        accelerator.save_state(path, wait=False)
        [writer] = {*threading.enumerate()} - before
        return writer.is_alive

    def step() -> float:
        begin = time.perf_counter()
        torch.stack([(parameter * parameter).sum() for parameter in model]).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # async_save's
    starts = {"torch.save": start_torch, "DCP, async_save": start_dcp, "headway": start_headway}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in starts}
    for _ in range(rounds + 1):
        for name, start in starts.items():
            usual = [step() for _ in range(40)]
            is_writing = start(folder / f"{name}{(number := number + 1)}")
            times = [step()]
            while is_writing():
                times.append(step())
            accelerator.wait_for_checkpoint()
            usual += [step() for _ in range(40)]
            taken[name].append((statistics.median(times), statistics.median(usual)))
    accelerator.end_training()
    rows = []
    print(f"\n{'a step during a save':<32}{'wall time':>12}{'ratio':>8}")
    for name, pairs in taken.items():
        ratio = statistics.median(during / usual for during, usual in pairs[1:])
        during = statistics.median(during for during, _ in pairs[1:])
        rows.append(Row("a step during a save", name, during, ratio))
        print(f"{name:<32}{during * 1e3:>9.2f} ms{ratio:>8.2f}", flush=True)
    return rows


def steps(folder: Path, rounds: int) -> list[Row]:
    accelerator, process = Accelerator(cpu=True), psutil.Process()
    model = torch.nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), DataLoader(Numbers(8000), 4, shuffle=True)
    )
    print(f"\n{'steps':<12}{'memory':>12}{'descriptors':>16}{'threads':>12}")
    for number in range(1, 11):
        for batch in loader:
            accelerator.backward(model(batch.expand(4, 4)).mean())
            optimizer.step()
            optimizer.zero_grad()
        if number in (1, 5, 10):
            memory = f"{process.memory_info().rss / 2**20:>8.1f} MiB"
            print(f"{number * 2000:<12,}{memory}{process.num_fds():>16}{process.num_threads():>12}")
    return []


TABLES = {
    one.__name__: one for one in (parameters, checkpoints, loaders, samples, background, steps)
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(TABLES), help="one table")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    for message in ("torch.distributed is disabled", "Detected an existing checkpoint"):
        warnings.filterwarnings("ignore", message, UserWarning)
    torch.set_num_threads(1)
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {os.cpu_count()} cores")
    rows: list[Row] = []
    for name in [options.only] if options.only else TABLES:
        with tempfile.TemporaryDirectory() as folder:
            rows += TABLES[name](Path(folder), options.repeat)
    if options.json:
        Path(options.json).write_text(json.dumps([row._asdict() for row in rows], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
