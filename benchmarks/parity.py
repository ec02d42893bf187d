"""Weights that several ranks train beside those of one plain PyTorch process on the same batches.

    python benchmarks/parity.py                # 1, 2 and 3 ranks
    python benchmarks/parity.py --ranks 2      # one row of the table

One launch for each number of ranks trains every combination of precision, accumulation and length
of the data; each rank trains the same model without Headway, on whole global batches. The table has
the largest difference of any weight on any rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product

import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.commands.tables import print_table
from headway.utils import gather_object

PRECISIONS = ("no", "bf16")
ACCUMULATION = (1, 3)
LENGTHS = {"even": 144, "uneven": 139}
BATCH_SIZE = 12  # of all ranks together
COMBINATIONS = list(product(PRECISIONS, ACCUMULATION, LENGTHS))


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def samples(length: int) -> TensorDataset:
    torch.manual_seed(2)
    return TensorDataset(torch.randn(length, 5), torch.randn(length, 1))


def optimizer_of(parameters: Iterator[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def flat(trained: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trained.parameters()])


def with_headway(precision: str, accumulation: int, length: int) -> torch.Tensor:
    """Train an epoch, drawn as torch draws it; return the weights, of shape [parameters]."""
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulation
    )
    size = BATCH_SIZE // accelerator.num_processes
    trained = model()
    wrapped, optimizer, loader = accelerator.prepare(
        trained,
        optimizer_of(trained.parameters()),
        DataLoader(samples(length), batch_size=size, shuffle=True),
    )
    torch.manual_seed(3)
    for x, y in loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward(torch.nn.functional.mse_loss(wrapped(x), y))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.free_memory()
    return flat(trained)


def without_headway(precision: str, accumulation: int, length: int, ranks: int) -> torch.Tensor:
    """Train the same on whole global batches, as a script of plain PyTorch does."""
    trained = model()
    optimizer = optimizer_of(trained.parameters())
    loader = DataLoader(samples(length), batch_size=BATCH_SIZE // ranks * ranks, shuffle=True)
    torch.manual_seed(3)
    batches = list(loader)
    for index, batch in enumerate(batches, start=1):
        repeated = -len(batch[0]) % ranks  # samples of the same batch
        x, y = (torch.cat([x, x[:repeated]]) for x in batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            outputs = trained(x).float()
        torch.autograd.backward(torch.nn.functional.mse_loss(outputs, y) / accumulation)
        if index % accumulation == 0 or index == len(batches):
            optimizer.step()
            optimizer.zero_grad()
    return flat(trained)


def compare() -> list[float]:
    """Return the largest difference for each combination, over all ranks."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    differences = []
    for precision, accumulation, kind in COMBINATIONS:
        ours = with_headway(precision, accumulation, LENGTHS[kind])
        plain = without_headway(precision, accumulation, LENGTHS[kind], ranks)
        differences.append(max(gather_object([(ours - plain).abs().max().item()])))
    return differences


def measured(ranks: int) -> list[float]:
    """Launch this script with so many ranks; return what `compare` returns."""
    launch = [sys.executable, "-m", "headway", "launch", "-q", "--cpu"]
    words = [*launch, "--num-processes", str(ranks), __file__, "--in-rank"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    found: list[float] = json.loads(done.stdout[done.stdout.index("{") :].splitlines()[0])["found"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, action="append", help="1, 2 and 3 if not given")
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")
    parser.add_argument("--in-rank", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.in_rank:
        found = compare()
        if int(os.environ.get("RANK", "0")) == 0:
            print(json.dumps({"found": found}))
        return
    rows = {ranks: measured(ranks) for ranks in parsed.ranks or (1, 2, 3)}
    if parsed.json:
        print(json.dumps(rows))
        return
    print_table(
        ("ranks", "precision", "accumulation", "length", "difference"),
        [
            (str(ranks), precision, str(accumulation), kind, f"{combination:.0e}")
            for ranks, differences in rows.items()
            for (precision, accumulation, kind), combination in zip(
                COMBINATIONS, differences, strict=True
            )
        ],
    )


if __name__ == "__main__":
    main()
