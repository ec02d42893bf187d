"""Training in a function that starts again with a smaller batch where memory runs out."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed
from torch.utils.data import DataLoader

accelerator = Accelerator()
tried = []


@find_executable_batch_size(starting_batch_size=64)
def train(batch_size):
    accelerator.free_memory()
    tried.append(batch_size)
    set_seed(8)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.randn(96, 3), batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        if len(batch) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        loss = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses


losses = train()
accelerator.print(json.dumps({"losses": losses, "tried": tried}))
