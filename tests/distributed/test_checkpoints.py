"""Checkpoints that several ranks save and load together."""

from __future__ import annotations

import re
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
from headway.checkpoint.saving import CheckpointProgress, State, prepare_checkpoint, write_prepared
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
def save_checkpoint(*words):
    write_prepared(prepare_checkpoint(*words))
own = {"rank": rank, "states": torch.full((2,), rank)}
plain = {name: one + rank for name, one in whole.items()}  # those of rank 0 count
saved = State({"sharded": state, "plain": plain}, own)
save_checkpoint(target, lambda folder: saved, CheckpointProgress(3, 1))
def fail(folder):
    (folder / f"hook_{rank}.txt").write_text("mine")
    if rank == 1:
        raise OSError(28, "No space left on device", "there")
    return State({}, {})
try:
    save_checkpoint(target, fail, CheckpointProgress(4, 1))
except CheckpointError as error:
    print("refused:", error.problems[0].what)
save_checkpoint(Path(f"other{rank}"), lambda folder: saved, CheckpointProgress(5, 1))
save_checkpoint(Path("other1"), lambda folder: saved, CheckpointProgress(6, 1))
local = Path(f"disk_of_rank_{rank}")  # as on machines that share no disk
for use, *rest in (
    (save_checkpoint, local / "a", lambda _: State({}, {}), CheckpointProgress(7, 1)),
    (load_checkpoint, Path(f"other{rank}")),
):
    try:
        use(*rest)
    except CheckpointError as error:
        print(f"told {rank}:", error.problems[0].what)
def leave(folder):
    Path(local).mkdir(exist_ok=True)
    os.chdir(local)
    return saved
save_checkpoint(Path("moved"), leave, CheckpointProgress(8, 1))
dist.destroy_process_group()
"""
)
LOAD = (
    COMMON
    + """
live = {f"shared.sharded.{name}": torch.zeros_like(one) for name, one in state.items()}
loaded = load_checkpoint(target, lambda name, saved, _: live.get(name, saved))
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
    assert [(one.path.name, verify(one.path).step) for one in checkpoints_in(Path("."))] == [
        *(("saved", 3), ("other0", 5), ("other1", 6), ("moved", 8))
    ]
    for rank in (0, 1):
        assert f"told {rank}: a rank does not see the folder" in done.stdout
        assert f"told {rank}: the checkpoint was replaced while it was loaded" in done.stdout
    assert leftovers_in(Path(".")) == []
    done = launch(*words, "3", script(LOAD, "load.py"))
    assert done.returncode == 0, done.stderr
    assert "values.json" in done.stdout


BACKGROUND = """
import os, sys, threading
from pathlib import Path
import torch
from headway import Accelerator
from headway.checkpoint import background, saving
from headway.errors import CheckpointError
from torch.distributed.fsdp import fully_shard
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
rank = accelerator.process_index

def prepared(is_sharded):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    if is_sharded:
        fully_shard(model)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

def train(model, optimizer, steps):
    for step in range(steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((2, 7), 1.0 + step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()

def full(one):
    return one.full_tensor() if hasattr(one, "full_tensor") else one

def state(model, optimizer):
    return [
        repr(full(one).tolist())
        for one in [*model.state_dict().values()]
        + [value for one in optimizer.state.values() for value in one.values()]
    ]
"""
SAVE_ASIDE = (
    BACKGROUND
    + """
for name, is_sharded in [("whole", False), ("sharded", True)]:
    model, optimizer = prepared(is_sharded)
    train(model, optimizer, 3)  # an open accumulation: gradients are part of the state
    begin, written = threading.Event(), saving.save_tensors
    def later(*arguments):
        begin.wait()
        return written(*arguments)
    saving.save_tensors = later
    accelerator.save_state(name, wait=False)
    expected = state(model, optimizer)
    train(model, optimizer, 4)  # ranks exchange gradients meanwhile
    assert not Path(name).exists() and state(model, optimizer) != expected
    begin.set()
    accelerator.wait_for_checkpoint()
    saving.save_tensors = written
    accelerator.save_state("changed", wait=False)
    train(model, optimizer, 4)
    accelerator.load_state(name)
    assert state(model, optimizer) == expected
    assert any(one.grad is not None for one in model.parameters())
    def pop_on(ranks):
        hook = lambda models, weights, folder: rank in ranks and weights.pop()
        return accelerator.register_save_state_pre_hook(hook)
    for ranks in ([0, 1], [0]):
        handle = pop_on(ranks)
        try:
            accelerator.save_state(f"hooked {name} {ranks}")
        except CheckpointError as error:
            print(f"rank {rank} {name} {ranks}: {error.problems[0].what}")
        handle.remove()
    accelerator.free_memory()
describe = saving.describe_files
def fail(folder, *arguments, **options):
    if rank == 1:
        raise OSError(28, "No space left on device", str(folder / "there"))
    return describe(folder, *arguments, **options)
model, optimizer = prepared(True)
train(model, optimizer, 2)
saving.describe_files = fail
accelerator.save_state("sharded_step", wait=False)
try:
    accelerator.save_state("other")
except CheckpointError as error:
    print(f"rank {rank} refused: {error.problems[0].what} {error.problems[0].where}")
saving.describe_files = describe
torch.save(state(model, optimizer), f"expected_{rank}.pt")
accelerator.save_state("sharded_step", wait=False)  # the end of the script waits for it
"""
)
LOAD_ASIDE = (
    BACKGROUND
    + """
for is_sharded in (True, False):
    model, optimizer = prepared(is_sharded)
    accelerator.load_state("sharded_step")
    assert state(model, optimizer) == torch.load("expected_0.pt")
    accelerator.free_memory()
"""
)


def test_ranks_save_aside_while_they_train_and_sharded_states_are_loaded_by_other_ranks() -> None:
    words = ("-q", "--cpu", "--num-processes")
    done = launch(*words, "2", script(SAVE_ASIDE, "save.py"))
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} refused:" in done.stdout
    assert done.stdout.count("/there\n") == 2
    assert len(re.findall(r"sharded \[0\]: .*hook", done.stdout)) == 2
    hooked = [one.path.name for one in checkpoints_in(Path(".")) if "hooked" in one.path.name]
    assert sorted(hooked) == ["hooked sharded [0, 1]", "hooked whole [0, 1]", "hooked whole [0]"]
    assert not Path("other").exists()
    assert leftovers_in(Path(".")) == []
    done = launch(*words, "3", script(LOAD_ASIDE, "load.py"))
    assert done.returncode == 0, done.stderr
