"""Makes its own processes one by one, and each of them its rank."""
# mypy: ignore-errors

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def init_process(rank, size, port, fn):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", port)
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("WORLD_SIZE", str(size))
    dist.init_process_group("gloo")
    fn(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


def run(rank, size):
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor=tensor, dst=1)
    else:
        dist.recv(tensor=tensor, src=0)
    print(f"trained: rank {rank} of {size}")


if __name__ == "__main__":
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    mp.set_start_method("spawn")
    processes = [mp.Process(target=init_process, args=(rank, 2, port, run)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert all(process.exitcode == 0 for process in processes)
