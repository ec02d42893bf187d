"""Calls of which all ranks take part, made by one rank alone; see runtime_worker.py."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from headway import Accelerator, compat
from headway.checkpoint.manifest import read_manifest
from headway.data.configuration import DataLoaderConfiguration
from headway.distributed import meeting
from headway.errors import UsageError
from headway.utils import broadcast_object_list, gather_object
from tests.distributed.this_rank import FOLDER, RANK, WORLD

Calls = dict[str, Callable[[], object]]


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def calls_on_rank_0_alone() -> dict[str, list[str]]:
    """What rank 0 is told where the others are in a collective of torch's, and in another call."""
    if WORLD == 1:
        return {}
    with _looking_often():
        told = _told(Accelerator(project_dir=str(FOLDER / f"alone_{WORLD}")), _calls)
        return told | _told(Accelerator(strategy="fsdp"), _calls_of_shards)


def _calls(accelerator: Accelerator) -> Calls:
    one = torch.ones(1)
    model, optimizer = torch.nn.Linear(2, 1), torch.optim.SGD([one.requires_grad_()], lr=0.1)
    accelerator.prepare(optimizer)
    dispatching = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
    )
    shuffled = accelerator.prepare(DataLoader(range(8), shuffle=True))  # type: ignore[arg-type]
    dispatched = dispatching.prepare(DataLoader(range(8)))  # type: ignore[arg-type]
    streamed = accelerator.prepare(DataLoader(_Stream()))
    accelerator.save_state(FOLDER / "background", wait=False)

    def in_a_block() -> None:
        with accelerator.main_process_first():
            pass

    return {
        "load_state": lambda: accelerator.load_state(FOLDER / "missing"),
        "resume": accelerator.resume,
        "checkpoint": accelerator.checkpoint,
        "checkpoint every": lambda: (optimizer.step(), accelerator.checkpoint(every=1)),
        "should_stop": lambda: accelerator.should_stop,
        "gather": lambda: accelerator.gather(one),
        "gather_for_metrics": lambda: accelerator.gather_for_metrics(one),
        "gather_for_metrics objects": lambda: accelerator.gather_for_metrics(["one"]),
        "gather_object": lambda: gather_object(["one"]),
        "reduce": lambda: accelerator.reduce(one),
        "pad_across_processes": lambda: accelerator.pad_across_processes(one),
        "broadcast": lambda: accelerator.broadcast(one),
        "broadcast_object_list": lambda: broadcast_object_list(["one"]),
        "wait_for_everyone": accelerator.wait_for_everyone,
        "wait_for_checkpoint": accelerator.wait_for_checkpoint,
        "end_training": accelerator.end_training,
        "main_process_first": in_a_block,
        "check_trigger": accelerator.check_trigger,
        "prepare": lambda: accelerator.prepare(model),
        "shuffled loader": lambda: next(iter(shuffled)),
        "dispatching loader": lambda: next(iter(dispatched)),
        "loader of a stream": lambda: next(iter(streamed)),
    }


def _calls_of_shards(accelerator: Accelerator) -> Calls:
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    accelerator.backward(model(torch.ones(1, 4)).sum())
    losses = [model(torch.ones(1, 4)).sum() for _ in range(2)]

    def read_whole() -> None:
        with accelerator.whole(model):
            pass

    return {
        "save_state of shards": lambda: accelerator.save_state(FOLDER / "shards"),
        "get_state_dict of shards": lambda: accelerator.get_state_dict(model),
        "save_model of shards": lambda: accelerator.save_model(model, FOLDER / "shards"),
        "whole of shards": read_whole,
        "clip_grad_norm_ of shards": lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
        "backward of tokens": lambda: accelerator.backward(losses.pop(), num_tokens=4),
    }


def _told(
    accelerator: Accelerator, calls_of: Callable[[Accelerator], Calls]
) -> dict[str, list[str]]:
    found = {}
    for name, call in calls_of(accelerator).items():
        beside_torch = _error_of(call) if RANK == 0 else ""
        dist.all_reduce(torch.ones(1))  # as in a backward pass
        mine = call if RANK == 0 else lambda: broadcast_object_list(["another call"])
        if name == "broadcast_object_list":
            mine = call if RANK == 0 else accelerator.wait_for_everyone
        found[name] = [beside_torch, _error_of(mine)]
    return found


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except UsageError as error:
        return str(error)
    return "no error"


def save_state_on_some_ranks() -> dict[str, Any]:
    """What becomes of it with ddp: on rank 0 alone, beside another call, and on others."""
    if WORLD == 1:
        return {}
    with _looking_often():
        return {one.__module__: _saved_by_some(one(cpu=True)) for one in _ACCELERATORS}


_ACCELERATORS = Accelerator, compat.Accelerator


def _saved_by_some(accelerator: Accelerator) -> dict[str, Any]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    hooked = []
    accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: hooked.append([type(one).__name__ for one in models])
    )
    accelerator.register_load_state_pre_hook(
        lambda models, folder: hooked.append([type(one).__name__ for one in models])
    )
    target = FOLDER / f"by_rank_0_{WORLD}_{type(accelerator).__module__}"

    def step() -> None:
        accelerator.backward(model(torch.ones(1, 2)).mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    with redirect_stderr(io.StringIO()) as notes:
        for wait in (True, False):
            saved = model.module.weight.tolist()
            if RANK == 0:
                accelerator.save_state(target, wait=wait)
                accelerator.save_model(model, target / "weights")
            step()
    if RANK == 0:
        accelerator.save_state(target.with_name(f"{target.name}_later"))
    accelerator.wait_for_everyone()
    refused = _error_of(lambda: accelerator.save_state(target)) if RANK == WORLD - 1 else ""
    step()
    if RANK in (0, WORLD - 1):
        accelerator.save_state(target.with_name(f"{target.name}_some"))
    accelerator.wait_for_everyone()
    accelerator.save_state(target.with_name(f"{target.name}_all"))
    with redirect_stderr(io.StringIO()) as notes_of_load:
        accelerator.load_state(target)
    loaded = model.module.weight.tolist()
    step()
    manifests = {
        name: read_manifest(target.with_name(target.name + name))
        for name in ("", "_later", "_some", "_all")
    }
    return {
        "refused": refused,
        "hooked": hooked,
        "notes": [notes.getvalue(), notes_of_load.getvalue()],
        "weights": [one.name for one in (target / "weights").iterdir()],
        "saved": saved,
        "loaded": loaded,
        "after": accelerator.gather(model.module.weight.detach()).tolist(),
        "parts": {
            name: sum(file.path.startswith("values_rank") for file in one.files)
            for name, one in manifests.items()
        },
        "worlds": {one.world_size for one in manifests.values()} == {WORLD},
    }


def a_save_after_one_of_rank_0() -> str:
    """What rank 2 is told that saves alone after rank 0 has."""
    if WORLD != 3:
        return ""
    accelerator = Accelerator(cpu=True)
    with _looking_often():
        if RANK == 0:
            accelerator.save_state(FOLDER / "before")
        accelerator.wait_for_everyone()
        save = partial(accelerator.save_state, FOLDER / "after")
        told = _error_of(save) if RANK == 2 else ""
        dist.all_reduce(torch.ones(1))
    return told


def saves_of_ranks_0_and_2_of_3() -> dict[str, Any]:
    """What each of them is told, whichever is late, where rank 1 exchanges data meanwhile."""
    if WORLD != 3:
        return {}
    accelerator, found = compat.Accelerator(cpu=True), {}
    exchanges: Calls = {
        "torch's": lambda: dist.all_reduce(torch.ones(1)),
        "a gather": lambda: accelerator.gather(torch.ones(1)),
    }
    with _looking_often():
        for late in (0, 2):
            for name, exchange in exchanges.items():
                folder = FOLDER / f"late_{late}_{name}"
                if late == RANK:
                    time.sleep(20 * meeting._LOOK_EVERY_S)
                save = partial(accelerator.save_state, folder)
                told = _error_of(save) if RANK != 1 else "no error"
                for _step in range(2):
                    exchange()
                found[folder.name] = [told, read_manifest(folder).num_parts]
    return found


def an_end_after_an_error() -> bool:
    """Whether rank 0 waits for no other where its training ends by an error, which stays alone."""
    accelerator = Accelerator(cpu=True)
    with _looking_often():
        try:
            raise KeyError
        except KeyError as error:
            if RANK == 0:
                meeting.meet_to_end("end_training()")
            accelerator.wait_for_everyone()
            return error.__context__ is None


def samples_after_a_save_of_rank_0() -> dict[str, Any]:
    """This rank's samples of the rest of an epoch, and those after all have loaded in its place."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(24), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    folder, seen = FOLDER / f"samples_{WORLD}", []
    with _looking_often():
        for number, batch in enumerate(loader):
            seen += batch.tolist()
            if number == 1:
                seen = []
                if RANK == 0:
                    accelerator.save_state(folder)
                if WORLD > 1:
                    dist.all_reduce(torch.ones(1))  # as in a backward pass
    accelerator.load_state(folder)
    return {"went on": seen, "loaded": [one for batch in loader for one in batch.tolist()]}


def a_slow_rank() -> bool:
    """Whether the others wait for one that works on its own, after messages to another one."""
    accelerator = Accelerator(cpu=True)
    with _looking_often():
        if WORLD == 3 and RANK == 1:
            dist.send(torch.ones(1), 2)
        if WORLD == 3 and RANK == 2:
            dist.recv(torch.ones(1), 1)
        if RANK == WORLD - 1:
            time.sleep(10 * meeting._LOOK_EVERY_S)
        accelerator.wait_for_everyone()
    gathered: list[int] = accelerator.gather(torch.tensor(RANK)).tolist()
    return gathered == [*range(WORLD)]


@contextmanager
def _looking_often() -> Iterator[None]:
    before, meeting._LOOK_EVERY_S = meeting._LOOK_EVERY_S, 0.05
    try:
        yield
    finally:
        meeting._LOOK_EVERY_S = before
