"""Trains in ranks that are killed at random steps and go on, and once without a kill; compares.

python tests/distributed/killed_training.py FOLDER RANKS WORKERS ACCUMULATION KILLS SEED

Every rank is forked from this process, so that each attempt imports nothing. In each attempt but
the last, one of them kills itself (SIGKILL) at a random place of a random step; this process then
kills the others, and ends what they have left, as a launcher does. It prints the number of kills,
and ends with an error where the loss of any step of any rank, or a final weight, differs from that
of the run without a kill in a single bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import headway.checkpoint.loading
import headway.checkpoint.saving  # noqa: F401 - imported here once, not in every rank
from headway import Accelerator
from headway.checkpoint.folders import checkpoints_in
from headway.contract.forking import adopt_orphans
from headway.launcher.processes.process_cleanup import end_descendants
from headway.utils import ProjectConfiguration

EPOCHS = 3
PLACES = ("before the step", "after the backward pass", "after the step", "after the checkpoint")


class Augmented(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.rand(2) + random.random()])


class Steps:
    """Counts micro-batches; kills this process at one of them."""

    done = 0

    def __init__(self, doom: tuple[int, str] | None) -> None:
        self._doom = doom

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]

    def at(self, place: str) -> None:
        if self._doom is not None and self.done >= self._doom[0] and place == self._doom[1]:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, workers: int, accumulation: int, steps: Steps) -> None:
    """Train from the newest checkpoint to the end; write each step's loss when it is known."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(
        cpu=True, seed=3, gradient_accumulation_steps=accumulation, project_config=project
    )
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.LayerNorm(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
    loader: Any = DataLoader(Augmented(), 2, shuffle=True, num_workers=workers)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.register_for_checkpointing(steps)
    if checkpoints_in(folder / "checkpoints"):
        accelerator.load_state()
    rank = accelerator.process_index
    with open(folder / f"losses-{rank}", "a") as losses:
        for _ in range(loader.epoch, EPOCHS):
            for batch in loader:
                steps.at("before the step")
                with accelerator.accumulate(model):
                    loss = model(batch).square().mean()
                    accelerator.backward(loss)
                    steps.at("after the backward pass")
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                steps.done += 1
                losses.write(f"{steps.done} {loss.item().hex()}\n")
                losses.flush()
                steps.at("after the step")
                if steps.done % 2 == 0:
                    accelerator.save_state()
                    steps.at("after the checkpoint")
    weights = [one.flatten().tolist() for one in model.state_dict().values()]
    (folder / f"weights-{rank}").write_text(json.dumps(weights))
    accelerator.end_training()


def attempt(
    folder: Path, ranks: int, workers: int, accumulation: int, doomed: dict[int, Any]
) -> bool:
    """Fork the ranks, and wait for their end; return whether none was killed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            if ranks > 1:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            run_and_exit(folder, workers, accumulation, Steps(doomed.get(rank)))
        pids.append(pid)
    codes = []
    while pids:  # those that a killed rank was talking to may end before it, with an error
        pid, status = os.wait()
        if pid not in pids:  # a worker, adopted
            continue
        pids.remove(pid)
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1] == -signal.SIGKILL:
            for other in pids:
                os.kill(other, signal.SIGKILL)
    end_descendants(0)
    if any(codes) and -signal.SIGKILL not in codes:
        sys.exit("a rank failed")
    return not any(codes)


def run_and_exit(folder: Path, workers: int, accumulation: int, steps: Steps) -> None:
    try:
        train(folder, workers, accumulation, steps)
    except Exception:  # noqa: BLE001 - a forked rank must not go on as this process
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def seen(folder: Path, ranks: int) -> list[Any]:
    """Return each rank's losses by step, of all attempts, and its weights."""
    lines = [(folder / f"losses-{rank}").read_text().splitlines() for rank in range(ranks)]
    weights = [json.loads((folder / f"weights-{rank}").read_text()) for rank in range(ranks)]
    return [[sorted(set(one), key=lambda line: int(line.split()[0])) for one in lines], weights]


def main(folder: Path, ranks: int, workers: int, accumulation: int, kills: int, seed: int) -> None:
    torch.optim.AdamW([torch.zeros(1)])  # imports what every rank would import for its own
    adopt_orphans()
    chance = random.Random(seed)
    whole, killed = folder / "whole", folder / "killed"
    for one in (whole, killed):
        one.mkdir(parents=True)
    if not attempt(whole, ranks, workers, accumulation, {}):
        sys.exit("the run without a kill was killed")
    expected = seen(whole, ranks)
    last, num_kills = len(expected[0][0]), 0
    for number in range(kills):
        # each of the kills later than the one before it, in the mean
        step = chance.randrange(number * last // kills, (number + 2) * last // kills)
        step = min(step, last - 3)
        places = PLACES if step < last - 4 else PLACES[:-1]  # each attempt has a step left
        doomed = {chance.randrange(ranks): (step, chance.choice(places))}
        num_kills += not attempt(killed, ranks, workers, accumulation, doomed)
    if num_kills < kills:
        sys.exit(f"{num_kills} kills in place of {kills}")
    if not attempt(killed, ranks, workers, accumulation, {}):
        sys.exit("the last attempt was killed")
    if seen(killed, ranks) != expected:
        sys.exit(f"after {num_kills} kills: {seen(killed, ranks)}\nwithout: {expected}")
    print(num_kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
