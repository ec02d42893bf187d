"""Makes its own processes with torch.multiprocessing.spawn."""
# mypy: ignore-errors

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP


def find_free_port():
    with socket.socket() as sock:
        sock.bind(("", 0))
        return str(sock.getsockname()[1])


def run(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DDP(torch.nn.Linear(10, 5))
    model(torch.randn(20, 10)).sum().backward()
    print(f"trained: rank {dist.get_rank()} of {dist.get_world_size()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    mp.spawn(run, args=(world_size, find_free_port()), nprocs=world_size, join=True)
