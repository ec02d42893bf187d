"""Training data that do not divide evenly, accumulated over the end of an epoch."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed
from torch.utils.data import DataLoader

plugin = GradientAccumulationPlugin(num_steps=3)
accelerator = Accelerator(gradient_accumulation_plugin=plugin)
set_seed(22)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.randn(29, 3), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses, steps = [], []
for _epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        steps.append(accelerator.sync_gradients)
accelerator.print(json.dumps({"losses": losses, "steps": steps}))
