"""Checkpoints that several ranks save and load together."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from headway import Accelerator
from headway.checkpoint import saving
from headway.checkpoint.folders import SaveTimes, checkpoints_in, leftovers_in
from headway.checkpoint.loading import load_checkpoint
from headway.checkpoint.manifest import verify
from headway.checkpoint.saving import (
    CheckpointProgress,
    Contents,
    prepare_checkpoint,
    write_prepared,
)
from headway.errors import CheckpointError
from tests.distributed.in_ranks import RANK, WORLD, run_in_ranks

pytestmark = pytest.mark.distributed


def sharded_state() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state of a model, whole and sharded over all ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    whole = {name: t.clone() for name, t in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    return whole, model.state_dict()


def full(one: Any) -> torch.Tensor:
    whole: torch.Tensor = one.full_tensor() if hasattr(one, "full_tensor") else one
    return whole


def save_together() -> None:
    whole, state = sharded_state()
    own = {"rank": RANK, "states": torch.full((2,), RANK)}
    plain = {name: t + RANK for name, t in whole.items()}  # those of rank 0 count
    saved = Contents({"sharded": state, "plain": plain}, own)

    def save(folder: Path, step: int, read: Any = lambda _: saved) -> None:
        write_prepared(prepare_checkpoint(folder, read, CheckpointProgress(step, 1), SaveTimes()))

    def fail(folder: Path) -> Contents:
        (folder / f"hook_{RANK}.txt").write_text("mine")
        if RANK == 1:
            raise OSError(28, "No space left on device", "there")
        return Contents({}, {})

    save(Path("saved"), 3)
    with pytest.raises(CheckpointError) as failed:
        save(Path("saved"), 4, fail)
    assert RANK == 0 or "No space left on device" in failed.value.problems[0].what
    save(Path(f"other{RANK}"), 5)
    save(Path("other1"), 6)
    local = Path(f"disk_of_rank_{RANK}")  # as on machines that share no disk
    with pytest.raises(CheckpointError, match="a rank cannot see the folder"):
        save(local / "a", 7, lambda _: Contents({}, {}))
    with pytest.raises(CheckpointError, match="was replaced while it was being loaded"):
        load_checkpoint(Path(f"other{RANK}"))

    def leave(folder: Path) -> Contents:
        local.mkdir(exist_ok=True)
        os.chdir(local)
        return saved

    save(Path("moved"), 8, leave)
    dist.destroy_process_group()


def load_together() -> None:
    whole, state = sharded_state()
    live = {f"shared.sharded.{name}": torch.zeros_like(t) for name, t in state.items()}
    loaded = load_checkpoint(Path("saved"), lambda name, saved, _: live.get(name, saved))
    for name, tensor in whole.items():
        assert torch.equal(loaded.shared["plain"][name], tensor)
        assert torch.equal(full(loaded.shared["sharded"][name]), tensor)
    assert not any(bool(full(t).any()) for t in live.values())
    if RANK < 2:
        assert loaded.own is not None
        assert loaded.own["rank"] == RANK
        assert loaded.own["states"].tolist() == [RANK, RANK]
    else:
        assert loaded.own is None
    if RANK == 0:
        with Path("saved", "values.json").open("a") as file:
            file.write(" ")
    dist.barrier()
    with pytest.raises(CheckpointError) as refused:
        load_checkpoint(Path("saved"))
    assert "values.json" in str(refused.value.problems[0].where)
    dist.destroy_process_group()


def test_ranks_save_together_or_not_at_all_and_another_number_of_ranks_loads_it(
    tmp_path: Path,
) -> None:
    run_in_ranks(2, tmp_path, save_together)
    assert [(c.path.name, verify(c.path).step) for c in checkpoints_in(tmp_path)] == [
        *(("saved", 3), ("other0", 5), ("other1", 6), ("moved", 8))
    ]
    assert leftovers_in(tmp_path) == []
    run_in_ranks(3, tmp_path, load_together)


def prepared(accelerator: Accelerator, is_sharded: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    if is_sharded:
        fully_shard(model)
    found: tuple[Any, Any] = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.1)
    )
    return found


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((2, 7), 1.0 + step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def state_of(model: Any, optimizer: Any) -> list[str]:
    """Return all weights and states of the optimizer in full, bit for bit."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [repr(full(t).tolist()) for t in [*model.state_dict().values(), *states]]


def save_aside() -> list[str]:
    """Return the state in the last checkpoint, which is written when the script ends."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    for name, is_sharded in (("whole", False), ("sharded", True)):
        model, optimizer = prepared(accelerator, is_sharded)
        require_that_it_trains_meanwhile(accelerator, name, model, optimizer)
        for ranks in ([0, 1], [0]):
            save_with_a_hook_on(ranks, accelerator, name)
        accelerator.free_memory()
    model, optimizer = prepared(accelerator, is_sharded=True)
    train(accelerator, model, optimizer, 2)
    with pytest.MonkeyPatch.context() as patch:
        describe = vars(saving)["describe_files"]

        def fail(folder: Path, *arguments: Any, **options: Any) -> Any:
            if RANK == 1:
                raise OSError(28, "No space left on device", str(folder / "there"))
            return describe(folder, *arguments, **options)

        patch.setattr(saving, "describe_files", fail)
        accelerator.save_state("sharded_step", wait=False)
        with pytest.raises(CheckpointError) as refused:
            accelerator.save_state("other")
        assert str(refused.value.problems[0].where).endswith("/there")
    require_that_all_fail_if_one_does_around_hooks(accelerator, model)
    accelerator.save_state("sharded_step", wait=False)
    return state_of(model, optimizer)


def require_that_all_fail_if_one_does_around_hooks(accelerator: Accelerator, model: Any) -> None:
    def fail_on_rank_1(*_: Any, **__: Any) -> None:
        if RANK == 1:
            raise RuntimeError("on rank 1")

    accelerator.save_state("whole step")
    for hook in (fail_on_rank_1, lambda *_: None):
        save = accelerator.register_save_state_pre_hook(hook)
        load = accelerator.register_load_state_pre_hook(fail_on_rank_1)
        with pytest.MonkeyPatch.context() as patch:
            if RANK == 1:  # before the hooks
                patch.setattr(model, "state_dict", fail_on_rank_1)
            with pytest.raises(CheckpointError, match="on rank 1") as refused:
                accelerator.save_state("other")
        assert f"rank 1, {__file__}" in refused.value.problems[0].where
        with pytest.raises(CheckpointError, match="on rank 1"):
            accelerator.load_state("whole step")
        save.remove()
        load.remove()


def require_that_it_trains_meanwhile(
    accelerator: Accelerator, name: str, model: Any, optimizer: Any
) -> None:
    train(accelerator, model, optimizer, 3)  # an open accumulation: gradients belong to the state
    begin, write = threading.Event(), vars(saving)["save_tensors"]

    def write_later(*arguments: Any) -> Any:
        begin.wait()
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "save_tensors", write_later)
        accelerator.save_state(name, wait=False)
        expected = state_of(model, optimizer)
        train(accelerator, model, optimizer, 4)  # ranks exchange gradients meanwhile
        assert not Path(name).exists()
        assert state_of(model, optimizer) != expected
        begin.set()
        accelerator.wait_for_checkpoint()
    accelerator.save_state("changed", wait=False)
    train(accelerator, model, optimizer, 4)
    accelerator.load_state(name)
    assert state_of(model, optimizer) == expected
    assert any(p.grad is not None for p in model.parameters())


def save_with_a_hook_on(ranks: Sequence[int], accelerator: Accelerator, name: str) -> None:
    """Save with a hook that takes weights away on these ranks; shards need it on all."""

    def take(models: Any, weights: list[Any], folder: Any) -> None:
        if RANK in ranks:
            weights.pop()

    handle = accelerator.register_save_state_pre_hook(take)
    target = f"hooked {name} {ranks}"
    if name == "sharded" and len(ranks) < WORLD:
        with pytest.raises(CheckpointError) as refused:
            accelerator.save_state(target)
        assert "hook" in refused.value.problems[0].what
    else:
        accelerator.save_state(target)
    handle.remove()


def load_aside(expected: Collection[str]) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    for is_sharded in (True, False):
        model, optimizer = prepared(accelerator, is_sharded)
        accelerator.load_state("sharded_step")
        assert state_of(model, optimizer) == expected
        accelerator.free_memory()


def test_ranks_save_aside_while_they_train_and_sharded_states_are_loaded_by_other_ranks(
    tmp_path: Path,
) -> None:
    expected, _ = run_in_ranks(2, tmp_path, save_aside)
    hooked = sorted(c.path.name for c in checkpoints_in(tmp_path) if "hook" in c.path.name)
    assert hooked == ["hooked sharded [0, 1]", "hooked whole [0, 1]", "hooked whole [0]"]
    assert not (tmp_path / "other").exists()
    assert leftovers_in(tmp_path) == []
    run_in_ranks(3, tmp_path, load_aside, expected)
