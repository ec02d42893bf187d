"""What ranks tell each other, and who does what; see runtime_worker.py."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from typing import Any

import torch

from headway import Accelerator
from headway.distributed.collectives import DifferentTensors, gather_uneven
from headway.utils import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from tests.distributed.this_rank import FOLDER, RANK, WORLD


def collectives() -> dict[str, Any]:
    accelerator = Accelerator()
    one = torch.tensor([[RANK, RANK]])
    ragged = torch.ones(RANK + 1, 2)
    return {
        "gather": gather({"a": [one], "b": (torch.tensor(RANK),)})["a"][0].tolist(),
        "scalar": gather(torch.tensor(RANK)).tolist(),
        "objects": gather_object([f"rank {RANK}"]),
        "sum": accelerator.reduce(torch.tensor([1.0, RANK])).tolist(),
        "mean": reduce(torch.tensor(RANK)).item(),
        "scaled": reduce(torch.tensor(2), "sum", scale=0.5).item(),
        "broadcast": broadcast([torch.tensor(RANK)], from_process=WORLD - 1)[0].item(),
        "list": broadcast_object_list([f"rank {RANK}", RANK], from_process=WORLD - 1),
        "padded": pad_across_processes(ragged, pad_index=7).tolist(),
        "padded first": accelerator.pad_across_processes(ragged, pad_first=True)[0].tolist(),
        "untouched": pad_across_processes(torch.tensor(3.0), dim=1).item(),
    }


def different_tensors() -> dict[str, str]:
    """What each operation says of tensors that the ranks may not exchange."""
    last = int(RANK == WORLD - 1)
    longer, deeper = torch.ones(1 + last), torch.ones([1] * (1 + last))
    more = [longer[:1]] * (1 + last)
    typed = torch.ones(1, dtype=torch.float64 if last else torch.float32)
    attempts: dict[str, Callable[[], Any]] = {
        "gather": lambda: gather({"x": longer}),
        "gather more": lambda: gather(more),
        "gather types": lambda: gather(typed),
        "uneven": lambda: gather_uneven(torch.ones(1, 1 + last)),
        "pad_across_processes": lambda: pad_across_processes(deeper),
        "reduce": lambda: reduce(longer),
        "broadcast": lambda: broadcast(longer),
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except DifferentTensors as error:
            said[name] = str(error)
    return said


def mesh() -> list[Any]:
    """The world's device mesh; one rank has none."""
    world = Accelerator().parts.process.world
    if WORLD == 1:
        return []
    group = world.mesh.get_group("data")
    is_default = group is torch.distributed.group.WORLD
    return [world.mesh.get_local_rank("data"), world.mesh.size(), is_default]


def order_of_ranks() -> dict[str, Any]:
    accelerator = Accelerator()
    entered: list[float] = []
    with accelerator.main_process_first():
        entered.append(time.time())
        if accelerator.is_main_process:
            time.sleep(0.2)
            (FOLDER / f"first{WORLD}").touch()
        else:
            assert (FOLDER / f"first{WORLD}").exists()
    on_last = accelerator.on_process(lambda: RANK, process_index=WORLD - 1)
    accelerator.save({"rank": RANK}, FOLDER / f"saved{WORLD}.pt")
    accelerator.wait_for_everyone()
    return {
        "main": accelerator.on_main_process(lambda: RANK)(),
        "last": on_last(),
        "is last": accelerator.is_last_process,
        "saved": torch.load(FOLDER / f"saved{WORLD}.pt"),
        "type": accelerator.distributed_type == ("NO" if WORLD == 1 else "MULTI_CPU"),
        "place": [accelerator.process_index, accelerator.num_processes, str(accelerator.device)],
    }


def once_on_each_machine() -> dict[str, Any]:
    accelerator = Accelerator()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        accelerator.print("once")
    first = FOLDER / f"local first{WORLD}"
    with accelerator.local_main_process_first():
        if accelerator.is_local_main_process:
            time.sleep(0.3)
            first.touch()
        was_there = first.exists()
    return {
        "printed": printed.getvalue(),
        "local main": accelerator.on_local_main_process(lambda: RANK)(),
        "first was there": was_there,
    }
