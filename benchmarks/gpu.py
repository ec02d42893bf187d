"""What training a GPT of 124M parameters in bf16 costs beyond a loop written by hand, on one GPU.

    python benchmarks/gpu.py                       # with and without torch.compile; needs a GPU
    python benchmarks/gpu.py --json result.json
    python benchmarks/gpu.py --size tiny --no-compile     # only to try it: runs on a CPU, too

The model is that of examples/char_gpt.py, with AdamW, a schedule and clipped gradients. The
contenders live in one process and take turns, block by block, in an order that changes. Printed are
the medians over the blocks, and their ratios to the loop written by hand: tokens per second (1.00
or more is as fast), and the peak of the memory that torch allocated for the contender alone.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
sys.path.append(str(ROOT))  # where Headway is not installed

try:
    from char_gpt import GPT, SIZES, read_standard_library
except ImportError as error:
    print(f"error: headway cannot be imported: {error}")
    print("  from: benchmarks/gpu.py")
    print(
        f"  fix:  pip install {ROOT}; without a network: `pip download --dest wheels {ROOT}` where"
        " there is one, and here `pip install --no-index --find-links wheels headway`"
    )
    sys.exit(3)

MIB = 2**20
Train = Callable[[int], torch.Tensor]
"""Trains for so many steps and returns the last loss."""


class Objects(NamedTuple):
    """What a script makes before anybody prepares it."""

    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any


class Measured(NamedTuple):
    """The figures of one contender, one for each block."""

    tokens_per_s: list[float]
    peak_bytes: list[int]  # empty without a GPU


def objects(options: argparse.Namespace, device: torch.device, is_compiled: bool) -> Objects:
    """Return the same model, data and schedule for every contender."""
    torch.manual_seed(0)
    layers, heads, width, context, vocabulary = SIZES[options.size]
    text = read_standard_library()
    windows = TensorDataset(
        text[:-1].unfold(0, context, context), text[1:].unfold(0, context, context)
    )
    model = GPT(layers, heads, width, context, vocabulary).to(device)
    if is_compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95))
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
    loader = DataLoader(
        windows, options.batch_size, drop_last=True, pin_memory=device.type == "cuda"
    )
    return Objects(model, optimizer, scheduler, loader)


def by_hand(options: argparse.Namespace, device: torch.device, is_compiled: bool) -> Train:
    """Written by hand; the contender that all are compared with."""
    model, optimizer, scheduler, loader = objects(options, device, is_compiled)
    batches = endless(loader)

    def train(steps: int) -> torch.Tensor:
        for inputs, targets in itertools.islice(batches, steps):
            inputs = inputs.to(device, non_blocking=True)
            targets = targets.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(inputs, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return torch.as_tensor(loss.detach())

    return train


def headway(options: argparse.Namespace, device: torch.device, is_compiled: bool) -> Train:
    from headway import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=device.type == "cpu")
    return prepared(accelerator, objects(options, device, is_compiled))


def accelerate(options: argparse.Namespace, device: torch.device, is_compiled: bool) -> Train:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=device.type == "cpu")
    return prepared(accelerator, objects(options, device, is_compiled))


def prepared(accelerator: Any, made: Objects) -> Train:
    model, optimizer, scheduler, loader = accelerator.prepare(*made)
    batches = endless(loader)

    def train(steps: int) -> torch.Tensor:
        for inputs, targets in itertools.islice(batches, steps):
            loss = model(inputs, targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return torch.as_tensor(loss.detach())

    return train


def endless(loader: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


CONTENDERS = {"by hand": by_hand, "headway": headway, "accelerate": accelerate}


def installed() -> list[str]:
    """Leave out Accelerate where it is not there, and say so."""
    try:
        version("accelerate")
    except PackageNotFoundError:
        print("accelerate: not installed, left out", file=sys.stderr)
        return [name for name in CONTENDERS if name != "accelerate"]
    return list(CONTENDERS)


def lacking(options: argparse.Namespace, device: torch.device) -> tuple[str, str] | None:
    """Return what this machine lacks for the figures, and what to do about it; None for nothing."""
    if device.type == "cpu" and options.size != "tiny":
        return (
            f"the size {options.size} needs a CUDA GPU, and torch {torch.__version__} finds none",
            "run it on a machine with a GPU and a torch for CUDA, or try --size tiny --no-compile",
        )
    if device.type == "cuda" and not options.no_compile and find_spec("triton") is None:
        return ("torch.compile needs the package triton", "pip install triton, or --no-compile")
    return None


def measure(
    options: argparse.Namespace, device: torch.device, is_compiled: bool
) -> dict[str, Measured]:
    """Return the figures of each contender.

    Raises:
        RuntimeError: the contenders do not compute the same loss.
    """
    trains: dict[str, Train] = {}
    resident: dict[str, int] = {}  # bytes that a contender keeps between its blocks
    losses = []
    for name in installed():
        before = allocated(device)
        trains[name] = CONTENDERS[name](options, device, is_compiled)
        losses.append(trains[name](options.warm_up))
        resident[name] = allocated(device) - before
    if not torch.allclose(torch.stack(losses), losses[0], rtol=0.02):
        raise RuntimeError(f"the contenders differ in their loss: {torch.stack(losses).tolist()}")

    measured = {name: Measured([], []) for name in trains}
    tokens = options.steps * options.batch_size * SIZES[options.size][3]
    order = random.Random(0)
    for _ in range(options.blocks):
        for name in order.sample(list(trains), len(trains)):
            before = allocated(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            trains[name](options.steps).item()  # waits for the GPU
            measured[name].tokens_per_s.append(tokens / (time.perf_counter() - began))
            if device.type == "cuda":
                peak = torch.cuda.max_memory_allocated() - before + resident[name]
                measured[name].peak_bytes.append(peak)
    return measured


def allocated(device: torch.device) -> int:
    """Return the bytes of this GPU that torch has given out, after all work has ended."""
    if device.type != "cuda":
        return 0
    gc.collect()  # the contenders of an earlier table are in reference cycles
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def table(title: str, measured: dict[str, Measured]) -> list[dict[str, object]]:
    print(f"\n{title:<20}{'tokens/s':>12}{'/ by hand':>11}{'peak memory':>14}{'/ by hand':>11}")
    rows: list[dict[str, object]] = []
    base_speed, base_peak = medians(measured["by hand"])
    for name, figures in measured.items():
        speed, peak = medians(figures)
        memory = f"{peak / MIB:>10,.0f} MiB{peak / base_peak:>11.3f}" if base_peak else ""
        print(f"{name:<20}{speed:>12,.0f}{speed / base_speed:>11.3f}{memory}")
        rows.append(
            {"case": title, "contender": name, "tokens_per_s": speed, "peak_bytes": peak or None}
        )
    sys.stdout.flush()
    return rows


def medians(figures: Measured) -> tuple[float, float]:
    """Return the median tokens per second and bytes of peak memory, 0 without a GPU."""
    return statistics.median(figures.tokens_per_s), statistics.median(figures.peak_bytes or [0])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="124m")
    parser.add_argument("--batch-size", type=int, default=16, help="windows of text (default 16)")
    parser.add_argument("--blocks", type=int, default=20, help="blocks of each (default 20)")
    parser.add_argument("--steps", type=int, default=20, help="steps in a block (default 20)")
    parser.add_argument("--warm-up", type=int, default=20, help="steps before them (default 20)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    if problem := lacking(options, device):
        what, fix = problem
        print(f"error: {what}\n  from: benchmarks/gpu.py\n  fix:  {fix}")
        return 3
    name = torch.cuda.get_device_name() if has_gpu else platform.processor() or "CPU"
    print(f"torch {torch.__version__}, {name}, {options.size}, bf16", flush=True)
    rows = table("without compile", measure(options, device, is_compiled=False))
    if not options.no_compile:
        rows += table("torch.compile", measure(options, device, is_compiled=True))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
