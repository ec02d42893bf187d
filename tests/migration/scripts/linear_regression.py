"""The first example of a tutorial: prepare, backward, step."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
accelerator = Accelerator()
x = torch.randn(64, 4)
y = x @ torch.tensor([1.0, -2.0, 3.0, 0.5]) + 0.1
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

losses = []
for _epoch in range(3):
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs).squeeze(1), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
accelerator.print(json.dumps({"losses": losses}))
