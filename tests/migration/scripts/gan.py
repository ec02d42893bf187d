"""A GAN: two models, two optimizers, two backward passes in a step."""

import json

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])
set_seed(7)
real = torch.randn(48, 2) * 0.5 + 2
noise = torch.randn(48, 4)
generator = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
critic = torch.nn.Sequential(
    torch.nn.Linear(2, 16), torch.nn.LeakyReLU(0.2), torch.nn.Linear(16, 1)
)
g_optimizer = torch.optim.Adam(generator.parameters(), lr=5e-3, betas=(0.5, 0.999))
d_optimizer = torch.optim.Adam(critic.parameters(), lr=5e-3, betas=(0.5, 0.999))
loader = DataLoader(TensorDataset(real, noise), batch_size=4, shuffle=True, drop_last=True)
generator, critic, g_optimizer, d_optimizer, loader = accelerator.prepare(
    generator, critic, g_optimizer, d_optimizer, loader
)
criterion = torch.nn.BCEWithLogitsLoss()
history = {"critic": [], "generator": []}
for _epoch in range(2):
    for samples, latent in loader:
        ones, zeros = torch.ones(len(samples), 1), torch.zeros(len(samples), 1)
        fake = generator(latent)
        d_loss = criterion(critic(samples), ones) + criterion(critic(fake.detach()), zeros)
        accelerator.backward(d_loss)
        d_optimizer.step()
        d_optimizer.zero_grad()
        g_loss = criterion(critic(fake), ones)
        accelerator.backward(g_loss)
        g_optimizer.step()
        g_optimizer.zero_grad()
        d_optimizer.zero_grad()
        history["critic"].append(accelerator.reduce(d_loss.detach(), "mean").item())
        history["generator"].append(accelerator.reduce(g_loss.detach(), "mean").item())
accelerator.print(json.dumps(history))
