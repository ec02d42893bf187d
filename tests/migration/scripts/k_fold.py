"""Cross-validation: new objects for each fold, free_memory between them."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Subset, TensorDataset

accelerator = Accelerator()
set_seed(14)
x = torch.randn(60, 4)
data = TensorDataset(x, x.sum(1))
scores = []
for fold in range(3):
    set_seed(20 + fold)
    inside = [index for index in range(60) if index % 3 != fold]
    outside = [index for index in range(60) if index % 3 == fold]
    train = DataLoader(Subset(data, inside), batch_size=5, shuffle=True)
    valid = DataLoader(Subset(data, outside), batch_size=3)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, train, valid = accelerator.prepare(model, optimizer, train, valid)
    for inputs, targets in train:
        accelerator.backward((model(inputs).squeeze(1) - targets).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    errors = []
    with torch.inference_mode():
        for inputs, targets in valid:
            errors.append(
                accelerator.gather_for_metrics((model(inputs).squeeze(1) - targets).abs())
            )
    errors = torch.cat(errors)
    scores.append([len(errors), errors.mean().item()])
    model, optimizer, train, valid = accelerator.free_memory(model, optimizer, train, valid)
accelerator.print(json.dumps({"samples, error": scores}))
