"""Rank 0 alone reads the data, and batches are those of all ranks together."""

import json

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

config = DataLoaderConfiguration(split_batches=True, dispatch_batches=True)
accelerator = Accelerator(dataloader_config=config)
loader = accelerator.prepare(DataLoader(torch.arange(22), batch_size=8))
sizes, seen = [], []
for batch in loader:
    sizes.append(len(batch))
    seen.append(accelerator.gather_for_metrics(batch).tolist())
accelerator.print(json.dumps({"sizes": sizes, "seen": seen}))
