"""A schedule with warmup written for all processes, the way Accelerate's examples scale it."""

import json
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

accelerator = Accelerator(gradient_accumulation_steps=2)
set_seed(4)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.randn(64, 3), batch_size=4, shuffle=True)
num_steps = math.ceil(math.ceil(len(loader) / accelerator.num_processes) / 2) * 2
warmup, total = 2 * accelerator.num_processes, num_steps * accelerator.num_processes
scheduler = LambdaLR(
    optimizer, lambda step: min(step / warmup, max(0.0, (total - step) / (total - warmup)))
)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
losses, rates = [], []
for _epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        rates.append(scheduler.get_last_lr()[0])
accelerator.print(json.dumps({"losses": losses, "rates": rates}))
