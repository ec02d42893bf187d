import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
inputs, targets = torch.randn(64, 16), torch.randint(0, 4, (64,))
data = TensorDataset(inputs, targets)


def step(x, y):
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


# %% loader with workers, pinned memory and non-blocking copies
for x, y in DataLoader(
    data, 8, num_workers=2, persistent_workers=True, prefetch_factor=4, pin_memory=True
):
    step(x.to("cpu", non_blocking=True), y.to("cpu", non_blocking=True))


# %% a data set of dicts of numpy arrays
class Arrays(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"x": np.ones(16, dtype=np.float32) * index, "y": np.int64(index % 4)}


for batch in DataLoader(Arrays(), 8, shuffle=True):
    batch = {key: value.to("cpu") for key, value in batch.items()}
    step(batch["x"], batch["y"])


# %% a stream
class Stream(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(16), random.randrange(4)


for x, y in DataLoader(Stream(), 8):
    step(x, y)


# %% collate by hand with padding
def collate(samples):
    xs = [x[: random.randint(4, 16)] for x, _ in samples]
    padded = nn.utils.rnn.pad_sequence(xs, batch_first=True)
    padded = F.pad(padded, (0, 16 - padded.shape[1]))
    return padded, torch.stack([y for _, y in samples])


for x, y in DataLoader(data, 8, collate_fn=collate):
    step(x, y)


# %% distributed sampler
torch.distributed.init_process_group("gloo")
sampler = torch.utils.data.DistributedSampler(data, shuffle=True)
net = nn.parallel.DistributedDataParallel(net)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, 8, sampler=sampler):
        step(x, y)

# %% prepared workers that last, seeded samples, and a training that goes on
from headway import Accelerator

accelerator = Accelerator(seed=1, project_dir="runs")
net, optimizer, loader = accelerator.prepare(
    net, optimizer, DataLoader(data, 8, shuffle=True, num_workers=2, persistent_workers=True)
)
accelerator.resume()
for x, y in loader:
    step(x, y)
    accelerator.checkpoint(every=10)
