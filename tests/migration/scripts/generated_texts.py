"""Text results of several ranks: gather_for_metrics with objects, and gather_object."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.data import DataLoader

accelerator = Accelerator()
model = torch.nn.Linear(1, 1)
model, loader = accelerator.prepare(model, DataLoader(torch.arange(11.0), batch_size=2))
texts = []
for batch in loader:
    texts += accelerator.gather_for_metrics(
        [f"sample {one:.0f}" for one in batch], use_gather_object=True
    )
ranks = gather_object([f"rank {accelerator.process_index}"])
accelerator.print(json.dumps({"texts": texts, "ranks": ranks}))
