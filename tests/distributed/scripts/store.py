"""Written for torchrun: reads the address of the run and its own rank, and passes them to torch."""
# mypy: ignore-errors

import os

import torch
import torch.distributed as dist


def main():
    env = {key: os.environ[key] for key in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")}
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{env['MASTER_ADDR']}:{env['MASTER_PORT']}",
        rank=int(env["RANK"]),
        world_size=int(env["WORLD_SIZE"]),
    )
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size()
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print(f"trained: rank {dist.get_rank()} of {dist.get_world_size()}", "again" * restarts)
    dist.destroy_process_group()


main()
