"""Sequence parallelism, as written for torchrun: a device mesh of WORLD_SIZE, made first of all."""
# mypy: ignore-errors

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

device_type = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device_type, (int(os.environ["WORLD_SIZE"]),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8)).to(device_type)
plan = {
    "0": ColwiseParallel(input_layouts=Shard(0)),
    "2": RowwiseParallel(output_layouts=Shard(0)),
}
model = parallelize_module(model, mesh, plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, foreach=True)
for _ in range(3):
    model(torch.rand(8, 10, device=device_type)).sum().backward()
    optimizer.step()
print(f"trained: rank {mesh.get_rank()} of {mesh.size()}")
dist.destroy_process_group()
