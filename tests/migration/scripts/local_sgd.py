"""LocalSGD: ranks average their weights every few steps."""

import json

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(15)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(torch.randn(64, 3), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4, enabled=True) as local_sgd:
    for batch in loader:
        loss = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        local_sgd.step()
        losses.append(accelerator.gather(loss.detach()).mean().item())
accelerator.print(json.dumps({"losses": losses}))
