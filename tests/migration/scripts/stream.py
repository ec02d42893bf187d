"""An iterable data set without length, two epochs, and its metric."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        for index in range(23):
            yield {"x": torch.full((2,), index / 10), "id": index}


accelerator = Accelerator()
set_seed(10)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(Stream(), batch_size=3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses, ids = [], []
for _epoch in range(2):
    for batch in loader:
        loss = (model(batch["x"]).squeeze(1) - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        ids.append(accelerator.gather_for_metrics(batch["id"]).tolist())
accelerator.print(json.dumps({"losses": losses, "ids": ids}))
