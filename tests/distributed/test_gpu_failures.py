"""What only GPUs show: an NCCL failure, memory that one rank fills, a rank missing in a collective.

Each needs two GPUs, as NCCL refuses two ranks on one; memory needs only one.
"""

from __future__ import annotations

import pytest

from tests.distributed.launching import launch, script

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.distributed,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

BEGIN = """
import os, sys, time
import torch
import torch.distributed as dist
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
x = torch.ones(1024, device="cuda")
dist.all_reduce(x)
"""
FILL = """
import os
import torch
rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
if rank == world_size - 1:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
"""


@needs_two_gpus
def test_a_rank_that_is_missing_in_a_collective_of_nccl_is_named() -> None:
    name = script(BEGIN + "if rank == 1: time.sleep(1000)\ndist.all_reduce(x)\nx.sum().item()\n")
    done = launch("--num-processes", "2", "--hang-timeout", "15", name, code=124)
    assert "rank 1 has not entered all_reduce #2" in done.stderr, done.stderr


@needs_two_gpus
def test_a_rank_that_dies_in_a_collective_of_nccl_is_blamed_and_not_the_one_that_waits() -> None:
    name = script(BEGIN + "if rank == 1: os.kill(os.getpid(), 9)\ndist.all_reduce(x)\n")
    done = launch("--num-processes", "2", name, code=128 + 9)
    assert "error: rank 1 of 2" in done.stderr, done.stderr


@needs_two_gpus
def test_ranks_that_share_a_gpu_by_mistake_are_told_what_nccl_says() -> None:
    name = script(BEGIN.replace("set_device(rank)", "set_device(0)"))
    done = launch("--num-processes", "2", name, code=1)
    assert "Duplicate GPU" in done.stderr, done.stderr


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_two_gpus)])
def test_the_rank_whose_gpu_is_full_is_named_with_what_to_do(ranks: int) -> None:
    done = launch("--num-processes", str(ranks), "--supervise", script(FILL), code=1)
    rank = "rank 0" if ranks == 1 else "rank 1 of 2"
    assert f"{rank} failed with OutOfMemoryError" in done.stderr
    assert "reduce the batch size" in done.stderr
