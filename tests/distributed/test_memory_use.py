"""After a run whose memory was estimated, one line has the estimate and what GPUs gave."""

from __future__ import annotations

import re
import sys

import pytest

from headway.contract.run import RunContract, encode
from tests.distributed.launching import environment, launch, run, script

TRAINING = """
import os, sys, torch
from headway import Accelerator
accelerator = Accelerator()
net = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(net.parameters())
net, optimizer = accelerator.prepare(net, optimizer)
for _ in range(2):
    accelerator.backward(net(torch.ones(4, 512, device=accelerator.device)).sum())
    optimizer.step()
"""
ON_GPUS = """
Accelerator()
rank = int(os.environ.get("RANK", 0))
torch.cuda.is_initialized = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.max_memory_allocated = lambda gpu: (rank + 1) * 2**30
torch.cuda.max_memory_reserved = lambda gpu: (rank + 2) * 2**30
"""


@pytest.mark.distributed
@pytest.mark.wording
def test_the_launcher_tells_the_estimate_and_what_the_highest_rank_took() -> None:
    words = ("-q", "--cpu", "--num-processes", "2", "--fit-memory")
    done = launch(*words, script(TRAINING + ON_GPUS))
    assert done.returncode == 0, done.stderr
    *_, line = done.stderr.splitlines()
    parts = re.fullmatch(
        r"headway: memory: estimated (\d\.\d) MiB, allocated 2\.00 GiB, reserved 3\.00 GiB "
        r"\(highest of 2 ranks: rank 1\)",
        line,
    )
    assert parts is not None, done.stderr
    assert 3 * 2**20 <= float(parts[1]) * 2**20 <= 5 * 2**20  # weights, gradients, DDP's copy


@pytest.mark.processes
@pytest.mark.wording
@pytest.mark.parametrize(
    ("estimated_bytes", "end", "told"),
    [(2**30, "", 1), (2**30, "raise SystemError", 0), (None, "", 0)],
)
def test_a_single_process_tells_it_itself_once_after_a_success_and_only_of_an_estimate(
    estimated_bytes: int | None, end: str, told: int
) -> None:
    contract = RunContract("cpu", "no", 1, origins={}, estimated_bytes=estimated_bytes)
    path = script(f"{TRAINING}{ON_GPUS}{end}")
    variables = environment(HEADWAY_RUN=encode(contract))
    done = run([sys.executable, path], variables, timeout_s=120)
    line = "headway: memory: estimated 1.00 GiB, allocated 1.00 GiB, reserved 2.00 GiB\n"
    assert done.stderr.count(line) == told, done.stderr
    assert done.stderr.count("headway: memory") == told
