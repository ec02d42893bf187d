"""Checkpoints that several ranks save and load together."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.checkpoint.folders import checkpoints_in, leftovers_in
from headway.checkpoint.manifest import verify
from tests.distributed.launching import launch, script

pytestmark = pytest.mark.distributed

COMMON = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from headway.checkpoint.loading import load_checkpoint
from headway.checkpoint.saving import Progress, State, save_checkpoint
from headway.errors import CheckpointError
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
whole = {name: one.clone() for name, one in model.state_dict().items()}
fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
state = model.state_dict()
target = Path("saved")
"""
SAVE = (
    COMMON
    + """
own = {"rank": rank, "states": torch.full((2,), rank)}
plain = {name: one + rank for name, one in whole.items()}  # those of rank 0 count
saved = State({"sharded": state, "plain": plain}, own)
save_checkpoint(target, lambda folder: saved, Progress(3, 1))
def fail(folder):
    (folder / f"hook_{rank}.txt").write_text("mine")
    if rank == 1:
        raise OSError(28, "No space left on device", "there")
    return State({}, {})
try:
    save_checkpoint(target, fail, Progress(4, 1))
except CheckpointError as error:
    print("refused:", error.problems[0].what)
dist.destroy_process_group()
"""
)
LOAD = (
    COMMON
    + """
live = {f"shared.sharded.{name}": torch.zeros_like(one) for name, one in state.items()}
loaded = load_checkpoint(target, live)
for name, tensor in whole.items():
    assert torch.equal(loaded.shared["plain"][name], tensor)
    assert torch.equal(loaded.shared["sharded"][name].full_tensor(), tensor)
assert all(float(one.full_tensor().abs().sum()) == 0 for one in live.values())
if rank < 2:
    assert loaded.own["rank"] == rank and loaded.own["states"].tolist() == [rank, rank]
else:
    assert loaded.own is None
with open(target / "values.json", "a") as file:
    file.write(" " * (rank == 0))
dist.barrier()
try:
    load_checkpoint(target)
except CheckpointError as error:
    print("refused:", error.problems[0].where)
dist.destroy_process_group()
"""
)


def test_ranks_save_together_or_not_at_all_and_another_number_of_ranks_loads_it() -> None:
    words = ("-q", "--cpu", "--num-processes")
    done = launch(*words, "2", script(SAVE, "save.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("No space left on device") >= 1, done.stdout
    assert verify(Path("saved")).step == 3
    assert [one.path.name for one in checkpoints_in(Path("."))] == ["saved"]
    assert leftovers_in(Path(".")) == []
    done = launch(*words, "3", script(LOAD, "load.py"))
    assert done.returncode == 0, done.stderr
    assert "values.json" in done.stdout
