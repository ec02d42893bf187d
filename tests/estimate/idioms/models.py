import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))


def train(net, x=x, y=y, lossed=F.cross_entropy, **options):
    optimizer = torch.optim.AdamW(net.parameters(), **options)
    for _ in range(3):
        loss = lossed(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# %% convolutions and batch norm
net = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 4)
)
train(net, torch.randn(8, 1, 4, 4))


# %% checkpointed sequence
class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)]
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(checkpoint_sequential(self.blocks, 2, x, use_reentrant=False))


train(Sequence())


# %% frozen backbone, and counted parameters
net = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
net[0].requires_grad_(False)
print(f"{sum(p.numel() for p in net.parameters() if p.requires_grad):,} parameters", net)
train(net)


# %% a custom autograd function
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Custom(nn.Linear):
    def forward(self, x):
        return Double.apply(super().forward(x))


train(Custom(16, 4))


# %% mixture of experts
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(16, 4) for _ in range(3))

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        out = x.new_zeros(len(x), 4)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(-1)
            out.index_add_(0, rows, expert(x[rows]))
        return out


train(Experts())
