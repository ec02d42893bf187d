"""Groups that follow one another in the same ranks find each other, under both launchers."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

from tests.distributed.launching import begin, environment, launch, script

pytestmark = pytest.mark.distributed
PLAIN = """
import torch, torch.distributed as dist
for _ in range(6):
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
    dist.destroy_process_group()
"""
WITH_ACCELERATOR = """
import torch
from headway import Accelerator
for _ in range(6):
    accelerator = Accelerator(cpu=True)
    assert accelerator.reduce(torch.ones(1)) == 2
    accelerator.end_training()
"""


def test_groups_in_a_row_under_headway() -> None:
    launch("--cpu", "--num-processes", "2", script(PLAIN + WITH_ACCELERATOR), code=0)


def test_groups_in_a_row_under_torchrun(tmp_path: Path) -> None:
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", *words, script(WITH_ACCELERATOR)]
    running = begin(command, env=environment(TMPDIR=str(tmp_path)))  # it leaves a folder behind
    try:
        _, errors = running.communicate(timeout=120)
    finally:
        running.terminate()  # and not killed: its ranks would go on for good
        running.communicate()
    assert running.returncode == 0, errors


def test_torch_asks_for_the_store_and_forms_the_group_by_these_names() -> None:
    import torch.distributed.distributed_c10d as c10d

    source = inspect.getsource(c10d.init_process_group)
    asks = source.index("rendezvous_iterator = rendezvous(")
    assert asks < source.index("default_pg, _ = _new_process_group_helper(", asks)
