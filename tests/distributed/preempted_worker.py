"""Trains for four epochs with dropout, and can be stopped and started again at any time.

Each rank appends a line to FOLDER/ledger-RANK for each micro-batch: its epoch, the optimizer steps
done and its samples; at the end rank 0 writes the weights and the last run to FOLDER/done.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.utils import set_seed

NUM_SAMPLES, EPOCHS, STEPS = 52, 4, 28

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--nap", type=float, default=0.1, help="seconds, in each step")
parser.add_argument("--nap-from", type=int, default=1, help="the batch of this run")
parser.add_argument("--workers", type=int, default=0, help="of the loader")
parser.add_argument("--never", action="store_true", help="wait where resume() would be called")
args = parser.parse_args()

set_seed(7, device_specific=True)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir=args.folder / "runs")
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
inputs = torch.stack([torch.arange(NUM_SAMPLES), torch.arange(NUM_SAMPLES) % 3], dim=1).float()
size = 4 // accelerator.num_processes
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.AdamW(model.parameters(), lr=0.01),
    DataLoader(TensorDataset(inputs), size, shuffle=True, num_workers=args.workers),
)
set_seed(7, device_specific=True)
folder, rank = args.folder, accelerator.process_index
(folder / f"pid-{rank}.tmp").write_text(str(os.getpid()))
(folder / f"pid-{rank}.tmp").rename(folder / f"pid-{rank}")
while args.never:
    time.sleep(0.1)
run = accelerator.resume()
num_batches = 0
with (folder / f"ledger-{rank}").open("a", buffering=1) as ledger:
    for epoch in range(run.epoch, EPOCHS):
        for (batch,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            samples = [int(x) for x in batch[:, 0]]
            ledger.write(json.dumps([epoch, optimizer.step_count, samples]) + "\n")
            num_batches += 1
            time.sleep(args.nap if num_batches >= args.nap_from else 0)
            accelerator.checkpoint(every=4)
if rank == 0:
    weights = [t.tolist() for t in accelerator.unwrap_model(model).state_dict().values()]
    done = {"weights": repr(weights), "run": run._asdict(), "steps": optimizer.step_count}
    (folder / "done.json").write_text(json.dumps(done))
accelerator.end_training()
