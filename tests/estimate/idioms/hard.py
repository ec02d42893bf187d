import ctypes

import torch
import torch.nn.functional as F
from torch import nn

net = nn.Linear(16, 4)
optimizer = torch.optim.AdamW(net.parameters())
x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))


def step():
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# %% memory by address, which only real tensors have
for _ in range(3):
    address = net.weight.data_ptr()
    assert ctypes.c_float.from_address(address).value is not None
    step()

# %% the network
import urllib.request

for _ in range(3):
    urllib.request.urlopen("http://127.0.0.1:9/data.txt")
    step()
