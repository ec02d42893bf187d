"""Any rank may stop the training: set_trigger and check_trigger."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(12)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.randn(80, 2), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for batch in loader:
    loss = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
    if accelerator.is_last_process and loss.item() < 1.0:
        accelerator.set_trigger()
    if accelerator.check_trigger():
        break
accelerator.print(json.dumps({"losses": losses, "steps": len(losses)}))
