"""Trains for two epochs with random samples and dropout; saves after a step, or goes on there.

Each rank writes to FOLDER/WORLD_SIZE-RANK.json what it saw: for each step its number, the loss,
the rank's samples, and those of all ranks; and last its weights.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from headway import Accelerator
from headway.utils import DataLoaderConfiguration, set_seed


class Samples(Dataset[torch.Tensor]):
    def __init__(self, is_random: bool) -> None:
        self._is_random = is_random

    def __len__(self) -> int:
        return 41

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(2) + random.random() if self._is_random else torch.zeros(2)
        return torch.cat([torch.tensor([float(index), index % 3]), noise])


parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--load")
parser.add_argument("--save")
parser.add_argument("--at", type=int, default=0)
parser.add_argument("--split", action="store_true")
parser.add_argument("--dispatch", action="store_true")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--accumulation", type=int, default=1)
args = parser.parse_args()

set_seed(7 if args.load is None else 99, device_specific=True)
accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=args.accumulation,
    dataloader_config=DataLoaderConfiguration(
        split_batches=args.split, dispatch_batches=args.dispatch or None
    ),
)
torch.manual_seed(7 if args.load is None else 99)
model = torch.nn.Sequential(
    torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
)
set_seed(7, device_specific=True)
loader = DataLoader(
    Samples(args.workers == 0), args.batch_size, shuffle=True, num_workers=args.workers
)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=0.01), loader
)
step = 0
if args.load:
    accelerator.load_state(args.load)
    step = args.at
rank, size = accelerator.process_index, accelerator.num_processes
seen: list[object] = []
for _ in range(loader.epoch, 2):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        samples = batch[:, 0].tolist()
        of_all = accelerator.gather_for_metrics(samples, use_gather_object=True)
        seen.append([step, loss.item().hex(), samples, of_all])
        if step == args.at and args.save:
            accelerator.save_state(args.save)
seen.append([repr(one.tolist()) for one in model.state_dict().values()])
(args.folder / f"{size}-{rank}.json").write_text(json.dumps(seen))
accelerator.end_training()
