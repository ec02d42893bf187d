"""A short training run that `headway test` starts on every rank to verify a launch.

headway launch --num-processes 2 -m headway.smoke results.json
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset

from headway.accelerator import Accelerator
from headway.distributed.collectives import gather_object
from headway.distributed.rng import set_seed
from headway.ipc.choices import PRECISIONS
from headway.ipc.run_contract import Ranks, read_ranks

REDUCED_BYTES = 2**24  # size of an all-reduce on each rank
REPETITIONS = 5


class Outcome(NamedTuple):
    """The result of a check on one rank."""

    is_right: bool
    what: str


def main(results: str) -> None:
    """Run all checks on this rank; rank 0 writes their outcomes to the file `results` as JSON."""
    began = time.perf_counter()
    accelerator = Accelerator()
    accelerator.gradient_accumulation_steps = 1
    ranks, kind = accelerator.num_processes, accelerator.distributed_type.value
    what = f"{ranks} rank{'s' * (ranks > 1)} on {accelerator.device.type}"
    what += f" ({kind})" * (ranks > 1)
    rows = [_row("start", Outcome(True, what), began)]
    for name, check in CHECKS.items():
        began = time.perf_counter()
        mine = check(accelerator)
        outcomes = [Outcome(*fields) for fields in gather_object([tuple(mine)])]
        wrong = [f"rank {rank}: {item.what}" for rank, item in enumerate(outcomes) if not item[0]]
        rows.append(_row(name, Outcome(not wrong, "; ".join(wrong) or outcomes[0].what), began))
    if accelerator.is_main_process:
        with open(results, "w", encoding="utf-8") as file:
            json.dump(rows, file)
    accelerator.end_training()


def _row(name: str, outcome: Outcome, began: float) -> dict[str, object]:
    status = "ok" if outcome.is_right else "error"
    seconds = time.perf_counter() - began
    return {"check": name, "status": status, "what": outcome.what, "seconds": seconds}


def check_ranks(accelerator: Accelerator) -> Outcome:
    """Check that each rank number occurs exactly once."""
    ranks = gather_object([accelerator.process_index])
    expected = (read_ranks() or Ranks()).world_size
    is_right = ranks == list(range(expected))
    plural = "s" * (len(ranks) > 1)
    return Outcome(is_right, f"rank{plural} {', '.join(map(str, ranks))} of {expected}")


def check_all_reduce(accelerator: Accelerator) -> Outcome:
    """Check an all-reduce, and measure its bus bandwidth as defined by nccl-tests."""
    size = accelerator.num_processes
    if size == 1:
        return Outcome(True, "skipped: only one rank")
    numbers = torch.full((REDUCED_BYTES // 4,), accelerator.process_index + 1.0)
    numbers = numbers.to(accelerator.device)
    total = accelerator.reduce(numbers)  # also a warm-up
    seconds = []
    for _repetition in range(REPETITIONS):
        accelerator.wait_for_everyone()
        began = time.perf_counter()
        accelerator.reduce(numbers)[0].item()  # .item() waits for the device
        seconds.append(time.perf_counter() - began)
    bandwidth = REDUCED_BYTES / min(seconds) * 2 * (size - 1) / size
    is_right = bool((total == size * (size + 1) / 2).all())
    return Outcome(
        is_right,
        f"{REDUCED_BYTES // 2**20} MiB, sum {'correct' if is_right else 'wrong'}, "
        f"bus bandwidth {bandwidth / 1e9:.2f} GB/s",
    )


def check_precision(accelerator: Accelerator) -> Outcome:
    """Check that a prepared model multiplies matrices in the requested precision."""
    seen: list[torch.dtype] = []
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model[0].register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    accelerator.prepare(model)(torch.ones(2, 8, device=accelerator.device))
    accelerator.free_memory()
    wanted = getattr(torch, PRECISIONS[accelerator.mixed_precision].dtype)
    name = str(seen[0]).removeprefix("torch.")
    return Outcome(seen == [wanted], f"matrices are multiplied in {name}")


def check_step(accelerator: Accelerator) -> Outcome:
    """Check that a data-parallel step equals a single-process step on the global batch."""
    set_seed(0)
    size, rank = accelerator.num_processes, accelerator.process_index
    inputs = torch.randn(8 * size, 16).to(accelerator.device)
    targets = torch.randn(8 * size, 4).to(accelerator.device)
    alone = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    alone.to(accelerator.device)
    together = copy.deepcopy(alone)
    mse = torch.nn.functional.mse_loss

    optimizer: torch.optim.Optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    mse(alone(inputs), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()

    model, optimizer = accelerator.prepare(together, torch.optim.SGD(together.parameters(), lr=0.1))
    mine = slice(rank, None, size)
    for _attempt in range(20):  # the first fp16 steps may overflow
        accelerator.backward(mse(model(inputs[mine]), targets[mine]))
        optimizer.step()
        optimizer.zero_grad()
        if not accelerator.optimizer_step_was_skipped:
            break
    pairs = zip(together.parameters(), alone.parameters(), strict=True)
    difference = max(float((ours - other).detach().abs().max()) for ours, other in pairs)
    accelerator.free_memory()
    return Outcome(
        difference <= PRECISIONS[accelerator.mixed_precision].tolerance,
        f"weights differ by {difference:.1e} from a single process",
    )


def check_loader(accelerator: Accelerator) -> Outcome:
    """Check that the ranks together read every sample of a dataset once."""
    count = 11 * accelerator.num_processes + 3  # not divisible by batch size or ranks
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(count)), batch_size=4))
    samples: list[int] = []
    for (batch,) in loader:
        samples += accelerator.gather_for_metrics(batch).tolist()
    accelerator.free_memory()
    is_right = samples == list(range(count))
    return Outcome(is_right, f"{count} samples, {'each once' if is_right else f'got {samples}'}")


CHECKS: dict[str, Callable[[Accelerator], Outcome]] = {
    "ranks": check_ranks,
    "all-reduce": check_all_reduce,
    "precision": check_precision,
    "data loader": check_loader,
    "training step": check_step,  # last, because it shards its batches itself
}


if __name__ == "__main__":
    main(sys.argv[1])
