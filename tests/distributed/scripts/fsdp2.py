"""FSDP2, as written for torchrun: the device is that of LOCAL_RANK."""
# mypy: ignore-errors

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

rank = int(os.environ["LOCAL_RANK"])
device = torch.device(f"cuda:{rank}" if torch.cuda.is_available() else "cpu")
dist.init_process_group(dist.get_default_backend_for_device(device))
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))).to(device)
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(3):
    model(torch.randn(4, 16, device=device)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
print(f"trained: rank {dist.get_rank()} of {dist.get_world_size()}")
dist.destroy_process_group()
