"""Orders that depend on the seed and the epoch alone, with a convolution and batch norm."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
set_seed(17)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 4, 3),
    torch.nn.BatchNorm2d(4),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(4 * 36, 3),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = TensorDataset(torch.randn(48, 1, 8, 8), torch.randint(0, 3, (48,)))
loader = DataLoader(data, batch_size=6, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for epoch in range(2):
    loader.set_epoch(epoch)
    for images, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
accelerator.print(json.dumps({"losses": losses}))
