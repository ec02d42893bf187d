"""A model with a branch that not every batch uses: DistributedDataParallelKwargs."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from torch.utils.data import DataLoader


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.even, self.odd = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)

    def forward(self, x, use_even):
        return self.even(x) if use_even else self.odd(x)


handler = DistributedDataParallelKwargs(find_unused_parameters=True)
accelerator = Accelerator(kwargs_handlers=[handler])
set_seed(2)
model = Branches()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
loader = DataLoader(torch.randn(40, 3), batch_size=5)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for index, batch in enumerate(loader):
    loss = (model(batch, index % 2 == 0).squeeze(1) - batch.sum(1)).abs().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
accelerator.print(
    json.dumps({"losses": losses, "unused": accelerator.ddp_handler.find_unused_parameters})
)
