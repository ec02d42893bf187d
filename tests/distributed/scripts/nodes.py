"""Counts nodes, and makes a process for each of their devices: --multiprocessing-distributed."""
# mypy: ignore-errors

import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

parser = argparse.ArgumentParser()
parser.add_argument("--world-size", default=-1, type=int, help="number of nodes")
parser.add_argument("--rank", default=-1, type=int, help="node rank")
parser.add_argument("--dist-url", default="env://", type=str)
parser.add_argument("--multiprocessing-distributed", action="store_true")


def main():
    args = parser.parse_args()
    if args.dist_url == "env://" and args.world_size == -1:
        args.world_size = int(os.environ.get("WORLD_SIZE", 1))
    if args.dist_url == "env://" and args.rank == -1:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            args.dist_url = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
        args.rank = int(os.environ.get("RANK", 0))
    devices_per_node = 2
    if args.multiprocessing_distributed:
        args.world_size = devices_per_node * args.world_size
        mp.spawn(main_worker, nprocs=devices_per_node, args=(devices_per_node, args))
    else:
        main_worker(0, devices_per_node, args)


def main_worker(device, devices_per_node, args):
    args.rank = args.rank * devices_per_node + device
    dist.init_process_group(
        "gloo", init_method=args.dist_url, world_size=args.world_size, rank=args.rank
    )
    ones = torch.ones(1)
    dist.all_reduce(ones)
    print(f"trained: rank {args.rank} of {int(ones.item())}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
