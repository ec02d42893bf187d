import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))


def step(loss):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


# %% stops at a loss that is not a number
for _ in range(3):
    loss = F.cross_entropy(net(x), y)
    if torch.isnan(loss) or not torch.isfinite(loss) or math.isnan(loss.item()):
        raise SystemExit("loss is not finite")
    step(loss)

# %% skips a step with infinite gradients
for _ in range(3):
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if not torch.isinf(norm) and not torch.isnan(norm):
        optimizer.step()
    optimizer.zero_grad()

# %% accuracy, and predictions as numpy and lists
for _ in range(3):
    logits = net(x)
    accuracy = (logits.argmax(-1) == y).float().mean().item()
    correct = (logits.argmax(-1) == y).sum().item() / len(y)
    probabilities = logits.detach().softmax(-1).numpy()
    assert logits.argmax(1).cpu().numpy().shape == (8,) and probabilities.shape == (8, 4)
    assert len(logits.argmax(1).tolist()) == 8
    step(F.cross_entropy(logits, y))


# %% masks choose rows
for _ in range(3):
    mask = y != 3
    logits = net(x[mask])
    sure = logits.softmax(-1).max(-1).values > 0.2
    step(F.cross_entropy(logits[sure], y[mask][sure]))


# %% nonzero and unique
for _ in range(3):
    rows = (y >= 0).nonzero(as_tuple=True)[0]
    classes = torch.unique(y)
    assert len(classes) <= 4
    step(F.cross_entropy(net(x[rows]), y[rows]))

# %% where, masked select and masked fill
for _ in range(3):
    logits = net(x)
    rows = torch.where(logits[:, 0] > 0)[0]
    some = logits.masked_select(logits > 0)
    step(F.cross_entropy(logits.masked_fill(logits > 9, 0.0), y) + some.sum() + net(x[rows]).sum())


# %% checks of the data
assert torch.all(y >= 0) and (y < 4).all()
assert not torch.isnan(x).any()
assert torch.allclose(x, x.clone()) and torch.equal(y, y)
for _ in range(3):
    step(F.cross_entropy(net(x), y))


# %% one hot, scatter, topk, sort and a confusion matrix
for _ in range(3):
    logits = net(x)
    wanted = F.one_hot(y, 4).float()
    other = torch.zeros(8, 4).scatter_(1, y.unsqueeze(1), 1.0)
    hit = (logits.topk(2).indices == y.unsqueeze(1)).any(-1).float().mean()
    order = logits[:, 0].argsort(descending=True)
    counts = torch.bincount(y * 4 + logits.argmax(1), minlength=16).reshape(4, 4)
    step(F.mse_loss(logits, wanted) + F.mse_loss(logits, other) + logits[order].sum())


# %% the version of the code
import subprocess

try:
    version = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True)
except (OSError, subprocess.CalledProcessError):
    version = "unknown"
for _ in range(3):
    step(F.cross_entropy(net(x), y))
