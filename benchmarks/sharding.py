"""Step time of sharded training beside hand-written `fully_shard`, on gloo ranks of this machine.

    python benchmarks/sharding.py                     2 and 4 ranks
    python benchmarks/sharding.py --ranks 2 --rounds 40

Both train the same model in the same processes, in turns of a few steps, so that whatever else the
machine does meets both alike. The figure is the ratio of the times of neighbouring turns: its
median and the 95 % interval of that. The aim is 1.03 at most; the exit code is 1 where the whole
interval lies above it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

AIM = 1.03
RUN = [sys.executable, "-m", "headway", "launch", "--cpu"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Step time of FSDP beside hand-written FSDP2.")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=30, help="turns of each")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps in a turn")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args)
        return 0
    missed = False
    for ranks in args.ranks:
        low, middle, high = measured(ranks, args)
        print(f"{ranks} ranks: {middle:.3f} times hand-written ({low:.3f} to {high:.3f})")
        missed |= low > AIM
    return int(missed)


def measured(ranks: int, args: argparse.Namespace) -> tuple[float, float, float]:
    """Return the median ratio of step times with this many ranks, between its bounds."""
    options = [f"--{name}={getattr(args, name)}" for name in ("rounds", "steps", "width", "layers")]
    command = [*RUN, "--num-processes", str(ranks), __file__, *options]
    root = str(Path(__file__).parents[1])
    output = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": root},
    ).stdout
    [line] = [line for line in output.splitlines() if "ratios" in line]
    ratios = json.loads(line[line.index("{") :])["ratios"]
    return interval(ratios)


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, between the bounds of its 95 % interval by the bootstrap."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], statistics.median(ratios), medians[-50]


def measure(args: argparse.Namespace) -> None:
    """Time both in turns, on every rank; rank 0 prints the ratios."""
    from headway import Accelerator

    accelerator = Accelerator(strategy="fsdp")
    ours, by_hand = step_of_ours(accelerator, args), step_by_hand(accelerator, args)
    for step in (ours, by_hand):
        for _ in range(3):  # buffers, and the optimizer's state
            step()
    ratios = []
    for number in range(args.rounds):
        turns = (ours, by_hand) if number % 2 else (by_hand, ours)
        taken = {step: timed(accelerator, step, args.steps) for step in turns}
        ratios.append(taken[ours] / taken[by_hand])
    accelerator.print(json.dumps({"ratios": ratios}))


def timed(accelerator: Any, step: Callable[[], None], count: int) -> float:
    accelerator.wait_for_everyone()
    start = time.perf_counter()
    for _ in range(count):
        step()
    accelerator.wait_for_everyone()
    return time.perf_counter() - start


def step_of_ours(accelerator: Any, args: argparse.Namespace) -> Callable[[], None]:
    import torch

    model = build(args)
    optimizer: Any = torch.optim.AdamW(model.parameters(), foreach=True)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    batch = torch.randn(8, 16, args.width)

    def step() -> None:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(batch).square().mean())
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step


def step_by_hand(accelerator: Any, args: argparse.Namespace) -> Callable[[], None]:
    import torch
    from torch.distributed.fsdp import fully_shard

    model = build(args)
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    batch = torch.randn(8, 16, args.width)

    def step() -> None:
        model(batch).square().mean().backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm.full_tensor()
        optimizer.step()
        optimizer.zero_grad()

    return step


def build(args: argparse.Namespace) -> Any:
    """Return layers of a transformer, all of one class."""
    import torch

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer
    return torch.nn.Sequential(
        *(layer(args.width, 4, 4 * args.width, 0.0, batch_first=True) for _ in range(args.layers))
    )


if __name__ == "__main__":
    sys.exit(main())
