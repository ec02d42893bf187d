"""A schedule that steps once an epoch: step_scheduler_with_optimizer=False."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

accelerator = Accelerator(step_scheduler_with_optimizer=False)
set_seed(6)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
loader = DataLoader(torch.randn(32, 3), batch_size=4)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
losses, rates = [], []
for _epoch in range(3):
    for batch in loader:
        loss = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    scheduler.step()
    rates.append(scheduler.get_last_lr()[0])
accelerator.print(json.dumps({"losses": losses, "rates": rates}))
