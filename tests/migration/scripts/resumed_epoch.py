"""An epoch that begins in its middle: skip_first_batches."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(16)
loader = accelerator.prepare(DataLoader(torch.arange(40), batch_size=4, shuffle=True))
seen = [accelerator.gather(batch).tolist() for batch in loader]
skipped = accelerator.skip_first_batches(loader, 2)
rest = [accelerator.gather(batch).tolist() for batch in skipped]
accelerator.print(json.dumps({"seen": seen, "rest": rest, "lengths": [len(loader), len(skipped)]}))
