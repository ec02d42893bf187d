"""A classifier whose validation data do not divide evenly: predictions by gather_for_metrics."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
set_seed(5)
x = torch.randn(97, 6)
y = (x[:, :3].sum(1) > 0).long()
train = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True)
valid = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=5)
model = torch.nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, train, valid = accelerator.prepare(model, optimizer, train, valid)
results = []
for _epoch in range(2):
    model.train()
    for inputs, labels in train:
        accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    predicted, expected, losses = [], [], []
    for inputs, labels in valid:
        with torch.no_grad():
            logits = model(inputs)
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        guesses, truth, loss = accelerator.gather_for_metrics((logits.argmax(-1), labels, loss))
        predicted.append(guesses)
        expected.append(truth)
        losses.append(loss)
    hits = torch.cat(predicted) == torch.cat(expected)
    results.append([len(hits), hits.float().mean().item(), torch.cat(losses).mean().item()])
accelerator.print(json.dumps({"samples, accuracy, loss": results}))
