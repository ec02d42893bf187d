"""A range of machines goes on after a loss, and trains on each sample once, at one global batch."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.distributed.launching import finished, script, start
from tests.distributed.test_machines import on_loopback
from tests.waiting import wait_for_lines, wait_until

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.long,
    pytest.mark.usefixtures("executed_starts"),
    pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux"),
]

NUM_SAMPLES, EPOCHS, GLOBAL_BATCH = 120, 2, 12

TRAINS = f"""
import json, os, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from headway import Accelerator
accelerator = Accelerator(cpu=True, global_batch_size={GLOBAL_BATCH}, project_dir="runs")
torch.manual_seed(7)
model = torch.nn.Linear(1, 1)
samples = TensorDataset(torch.arange({NUM_SAMPLES}).float().unsqueeze(1))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=1e-6), DataLoader(samples, 4, shuffle=True)
)
run = accelerator.resume()
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], accelerator.process_index
with open(f"ledger_{{attempt}}_{{rank}}", "w", buffering=1) as ledger:
    for epoch in range(run.epoch, {EPOCHS}):
        for (batch,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            seen = [int(one) for one in batch[:, 0]]
            ledger.write(json.dumps([optimizer.step_count, epoch, seen]) + "\\n")
            time.sleep(0.1)
            accelerator.checkpoint(every=3)
accelerator.end_training()
"""


def ledger(attempt: int, rank: int) -> list[tuple[int, int, list[int]]]:
    """Return the micro-batches of a rank in one attempt: optimizer step, epoch, samples."""
    path = Path(f"ledger_{attempt}_{rank}")
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [tuple(json.loads(one)) for one in lines if one.endswith("\n")]


def steps_of(attempt: int, world: int) -> dict[int, list[tuple[int, int]]]:
    """Return the samples of all ranks, with their epochs, by optimizer step."""
    found: dict[int, list[tuple[int, int]]] = {}
    for rank in range(world):
        for step, epoch, samples in ledger(attempt, rank):
            found.setdefault(step, []).extend((epoch, sample) for sample in samples)
    return found


def test_a_lost_machine_of_a_range_costs_no_sample_and_changes_no_global_batch() -> None:
    place = [*on_loopback("2:3", "--set", "restart_delay=0"), "--machine-rank"]
    name = script(TRAINS)
    others = [start(*place, rank, name) for rank in ("1", "2")]
    for one in others:
        wait_for_lines(one, "waiting for machine 0")  # all three are there from the beginning
    machines = [start(*place, "0", name), *others]
    wait_until(lambda: len(ledger(0, 2)) > 7, *machines)
    lost = machines.pop()
    lost.kill()
    lost.communicate()
    for one in machines:
        finished(one, 0)
    before, after = steps_of(0, world=3), steps_of(1, world=2)
    went_on_at = min(after)
    assert 3 < went_on_at <= max(before) + 1
    trained = {**{step: one for step, one in before.items() if step < went_on_at}, **after}
    assert sorted(trained) == list(range(1, EPOCHS * NUM_SAMPLES // GLOBAL_BATCH + 1))
    assert {len(samples) for samples in trained.values()} == {GLOBAL_BATCH}
    seen = Counter(one for samples in trained.values() for one in samples)
    assert seen == Counter((epoch, one) for epoch in range(EPOCHS) for one in range(NUM_SAMPLES))
