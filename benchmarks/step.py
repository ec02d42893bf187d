"""What a training step costs beyond plain PyTorch, beside the peers, in one run.

    python benchmarks/step.py                         # all tables, 100 short blocks each
    python benchmarks/step.py --blocks 400            # narrower intervals
    python benchmarks/step.py --json result.json

A tiny MLP on the CPU, so that what a library adds to a step is not lost in the step itself:

1. one process: loader, forward, backward, optimizer step, scheduler step, zero_grad; here and in
   4. also with the loss logged by the jsonl tracker in every tenth step;
2. the same with 4 micro-batches to an optimizer step;
3. the loop over the loader alone;
4. two ranks, beside DistributedDataParallel written by hand.

Each process has one core and one thread. All contenders live in the same process and take turns,
block by block, in an order that changes. Printed are the medians over the blocks, their ratio to
plain PyTorch's median, and a 95% bootstrap interval of that ratio. One process is measured in CPU
time, so that other programs on the machine do not count; ranks, which wait for each other, in wall
time.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

Loop = Callable[[], None]
Tensors = tuple[torch.Tensor, torch.Tensor]
REBUILT_EVERY = 10  # blocks
RESAMPLES = 2000
RANKS = 2


class Case(NamedTuple):
    """One table."""

    title: str
    parts: int = 1  # micro-batches in an optimizer step
    trains: bool = True  # or walks through the loader only


ONE_PROCESS = (
    Case("one process"),
    Case("accumulation 4", parts=4),
    Case("the loader alone", trains=False),
)
SEVERAL_RANKS = (
    Case(f"DDP, {RANKS} ranks"),
    Case(f"DDP, {RANKS} ranks, accumulation 4", parts=4),
)


class Samples(Dataset[Tensors]):
    """Inputs and targets that cost next to nothing to read."""

    def __init__(self, count: int) -> None:
        self.inputs, self.targets = torch.randn(count, 16), torch.randn(count, 1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Tensors:
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: list[int]) -> Tensors:
        return self.inputs[indices], self.targets[indices]


class Objects:
    """What a script makes before anybody prepares it."""

    def __init__(self, steps: int, sampler: Callable[[Samples], Any] = lambda samples: None):
        torch.manual_seed(0)
        samples = Samples(steps * 8 * (RANKS if dist.is_initialized() else 1))
        self.model: Any = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        )
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.scheduler: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, 1000)
        self.loader: Any = DataLoader(
            samples, batch_size=8, collate_fn=lambda batch: batch, sampler=sampler(samples)
        )


loss_of = torch.nn.functional.mse_loss


def pytorch(case: Case, steps: int) -> Loop:
    """Written by hand; the contender that all are compared with."""
    is_one_of_many = dist.is_initialized()
    made = Objects(steps, DistributedSampler if is_one_of_many else lambda samples: None)
    optimizer, scheduler, loader = made.optimizer, made.scheduler, made.loader
    model = DistributedDataParallel(made.model) if is_one_of_many else made.model

    def train() -> None:
        for x, y in loader:
            loss_of(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def accumulate() -> None:
        for number, (x, y) in enumerate(loader, start=1):
            is_due = number % case.parts == 0 or number == steps
            with model.no_sync() if is_one_of_many and not is_due else nullcontext():
                (loss_of(model(x), y) / case.parts).backward()  # type: ignore[no-untyped-call]
            if is_due:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return _loop(case, loader, train, accumulate)


def headway(case: Case, steps: int) -> Loop:
    from headway import Accelerator

    return _prepared(Accelerator(cpu=True, gradient_accumulation_steps=case.parts), case, steps)


def headway_with_jsonl(case: Case, steps: int) -> Loop:
    """Log the loss with the built-in tracker in every tenth step."""
    from headway import Accelerator

    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=case.parts,
        log_with="jsonl",
        project_dir=folder.name,
    )
    accelerator.init_trackers("step")
    return _prepared(accelerator, case, steps, log_every=10)


def accelerate(case: Case, steps: int) -> Loop:
    from accelerate import Accelerator

    return _prepared(Accelerator(cpu=True, gradient_accumulation_steps=case.parts), case, steps)


def _prepared(accelerator: Any, case: Case, steps: int, log_every: int = 0) -> Loop:
    made = Objects(steps)
    model, optimizer, scheduler, loader = accelerator.prepare(
        made.model, made.optimizer, made.scheduler, made.loader
    )

    def train() -> None:
        for x, y in loader:
            accelerator.backward(loss_of(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def accumulate() -> None:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    def train_and_log() -> None:
        for number, (x, y) in enumerate(loader):
            loss = loss_of(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if number % log_every == 0:
                accelerator.log({"loss": loss}, step=number)

    return _loop(case, loader, train_and_log if log_every else train, accumulate)


def fabric(case: Case, steps: int) -> Loop:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    if dist.is_initialized():
        environment = TorchElasticEnvironment()  # the variables are torchrun's
        fabric = Fabric(accelerator="cpu", strategy="ddp", devices=RANKS, plugins=[environment])
    else:
        fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    made = Objects(steps)
    model, optimizer = fabric.setup(made.model, made.optimizer)
    loader, scheduler = fabric.setup_dataloaders(made.loader), made.scheduler

    def train() -> None:
        for x, y in loader:
            fabric.backward(loss_of(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def accumulate() -> None:
        for number, (x, y) in enumerate(loader, start=1):
            is_due = number % case.parts == 0 or number == steps
            with fabric.no_backward_sync(model, enabled=not is_due):
                fabric.backward(loss_of(model(x), y) / case.parts)
            if is_due:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return _loop(case, loader, train, accumulate)


def _loop(case: Case, loader: Any, train: Loop, accumulate: Loop) -> Loop:
    def walk() -> None:
        for _batch in loader:
            pass

    return walk if not case.trains else train if case.parts == 1 else accumulate


CONTENDERS = {
    "pytorch": pytorch,
    "headway": headway,
    "headway, jsonl every 10 steps": headway_with_jsonl,
    "fabric": fabric,
    "accelerate": accelerate,
}
PACKAGES = {"fabric": "lightning", "accelerate": "accelerate"}


def installed() -> Iterator[str]:
    """Leave out the peers that are not there, and say so."""
    for name in CONTENDERS:
        try:
            version(PACKAGES.get(name, "torch"))
            yield name
        except PackageNotFoundError:
            print(f"{name}: not installed, left out", file=sys.stderr)


def measure(case: Case, names: list[str], blocks: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds that a step took each contender, one figure for each block."""
    if case.parts > 1 or not case.trains:  # they do not log
        names = [name for name in names if CONTENDERS[name] is not headway_with_jsonl]
    gc.collect()
    gc.freeze()  # what the peers imported is nothing to look through in every block
    now = time.perf_counter if dist.is_initialized() else time.process_time
    seconds: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)  # the same on all ranks
    for block in range(blocks):
        if block % REBUILT_EVERY == 0:  # where objects lie in memory is worth some percent
            loops = {name: CONTENDERS[name](case, steps) for name in names}
            for loop in loops.values():  # which warms the caches
                loop()
        for name in order.sample(names, len(names)):
            if dist.is_initialized():
                dist.barrier()
            began = now()
            loops[name]()
            seconds[name].append((now() - began) / steps)
    return seconds


def interval(seconds: list[float], base: list[float]) -> tuple[float, float]:
    """Return a 95% bootstrap interval of the ratio of two medians; blocks are drawn in pairs."""
    draw, pairs = random.Random(0), list(zip(seconds, base, strict=True))
    ratios = []
    for _ in range(RESAMPLES):
        drawn, drawn_base = zip(*draw.choices(pairs, k=len(pairs)), strict=True)
        ratios.append(statistics.median(drawn) / statistics.median(drawn_base))
    ratios.sort()
    return ratios[int(RESAMPLES * 0.025)], ratios[int(RESAMPLES * 0.975)]


def table(case: Case, seconds: dict[str, list[float]]) -> list[dict[str, object]]:
    print(f"\n{case.title:<30}{'a step':>10}{'/ pytorch':>12}{'95% interval':>16}")
    rows: list[dict[str, object]] = []
    base = seconds["pytorch"]
    for name, figures in seconds.items():
        median, (low, high) = statistics.median(figures), interval(figures, base)
        ratio = median / statistics.median(base)
        print(f"{name:<30}{median * 1e6:>7.0f} us{ratio:>12.3f}{low:>9.3f} -{high:>5.3f}")
        row = {"case": case.title, "contender": name, "step_s": median, "ratio": ratio}
        rows.append({**row, "low": low, "high": high})
    return rows


def run_cases(cases: tuple[Case, ...], options: argparse.Namespace) -> list[dict[str, object]]:
    """Measure `cases` in this process, on a core of its own."""
    if hasattr(os, "sched_setaffinity"):  # not on a Mac
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ.get("RANK", "0")) % len(cores)]})
    torch.set_num_threads(1)
    names, rows = list(installed()), []
    for case in cases:
        seconds = measure(case, names, options.blocks, options.steps)
        if not dist.is_initialized() or dist.get_rank() == 0:
            rows += table(case, seconds)
            sys.stdout.flush()
    return rows


def run_ranks(options: argparse.Namespace) -> list[dict[str, object]]:
    """Measure the cases of several ranks in ranks that `headway launch` starts."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "ranks.json"
        launch = [sys.executable, "-m", "headway", "launch", "--quiet", "--cpu"]
        mine = ["--as-rank", "--json", str(result)]
        sizes = ["--blocks", str(options.blocks), "--steps", str(options.steps)]
        ranks = ["--num-processes", str(RANKS), __file__]
        subprocess.run([*launch, *ranks, *mine, *sizes], check=True)
        rows: list[dict[str, object]] = json.loads(result.read_text())
        return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=100, help="blocks of each (default 100)")
    parser.add_argument("--steps", type=int, default=60, help="steps in a block (default 60)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        dist.init_process_group("gloo")
        rows = run_cases(SEVERAL_RANKS, options)
        if options.json and dist.get_rank() == 0:
            Path(options.json).write_text(json.dumps(rows))
        dist.destroy_process_group()
        return 0
    cores = f"{os.cpu_count()} cores, {options.blocks} blocks of {options.steps} steps"
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {cores}", flush=True)
    try:
        rows = run_ranks(options) + run_cases(ONE_PROCESS, options)
    except subprocess.SubprocessError as error:
        print(f"the ranks failed: {error}", file=sys.stderr)
        return 1
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
