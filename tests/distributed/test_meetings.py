"""Calls of which all ranks take part, made by some only: no rank waits for ever."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from headway import Accelerator, compat
from headway.checkpoint.manifest import read_manifest
from headway.data.configuration import DataLoaderConfiguration
from headway.distributed import meeting
from headway.errors import UsageError
from headway.utils import broadcast_object_list, gather_object
from tests.distributed.in_ranks import RANK, WORLD, marks, of_all_ranks, with_ranks
from tests.distributed.launching import launch, script

pytestmark = marks(__name__)
Calls = dict[str, Callable[[], object]]


@contextmanager
def looking_often() -> Iterator[None]:
    before, meeting._LOOK_EVERY_S = meeting._LOOK_EVERY_S, 0.05
    try:
        yield
    finally:
        meeting._LOOK_EVERY_S = before


def places_in(told: str) -> list[str]:
    """Return the lines of this file that a message names."""
    return re.findall(rf"{Path(__file__).name}:\d+", told)


def require_refusal(call: Callable[[], object], name: str = "") -> None:
    """Require an error that names both places."""
    with pytest.raises(UsageError) as refused:
        call()
    assert len({*places_in(str(refused.value))}) == 2, (name, refused.value)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def calls_of_all(accelerator: Accelerator) -> Calls:
    one = torch.ones(1)
    model, optimizer = torch.nn.Linear(2, 1), torch.optim.SGD([one.requires_grad_()], lr=0.1)
    accelerator.prepare(optimizer)
    dispatching = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
    )
    shuffled = accelerator.prepare(DataLoader(range(8), shuffle=True))  # type: ignore[arg-type]
    dispatched = dispatching.prepare(DataLoader(range(8)))  # type: ignore[arg-type]
    streamed = accelerator.prepare(DataLoader(Stream()))
    accelerator.save_state("background", wait=False)

    def in_a_block() -> None:
        with accelerator.main_process_first():
            pass

    return {
        "load_state": lambda: accelerator.load_state("missing"),
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


def calls_of_shards(accelerator: Accelerator) -> Calls:
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    accelerator.backward(model(torch.ones(1, 4)).sum())
    losses = [model(torch.ones(1, 4)).sum() for _ in range(2)]

    def read_whole() -> None:
        with accelerator.whole(model):
            pass

    return {
        "save_state of shards": lambda: accelerator.save_state("shards"),
        "get_state_dict of shards": lambda: accelerator.get_state_dict(model),
        "save_model of shards": lambda: accelerator.save_model(model, "shards"),
        "whole of shards": read_whole,
        "clip_grad_norm_ of shards": lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
        "backward of tokens": lambda: accelerator.backward(losses.pop(), num_tokens=4),
    }


@with_ranks(2, 3)
def test_a_call_on_one_rank_alone_names_both_places_and_the_ranks_can_go_on() -> None:
    """Where the others are in a collective of torch's, and in another call."""
    with looking_often():
        require_refusals_of_calls_on_rank_0(Accelerator(project_dir="alone"), calls_of_all)
        require_refusals_of_calls_on_rank_0(Accelerator(strategy="fsdp"), calls_of_shards)


def require_refusals_of_calls_on_rank_0(
    accelerator: Accelerator, calls: Callable[[Accelerator], Calls]
) -> None:
    for name, call in calls(accelerator).items():
        if RANK == 0:
            require_refusal(call, name)
        dist.all_reduce(torch.ones(1))  # as in a backward pass
        is_same = name == "broadcast_object_list"
        others = accelerator.wait_for_everyone if is_same else another_call
        require_refusal(call if RANK == 0 else others, name)


def another_call() -> object:
    return broadcast_object_list(["another call"])


@with_ranks(2, 3)
def test_save_state_on_rank_0_alone_saves_what_all_share_and_all_ranks_load_it() -> None:
    for kind in (Accelerator, compat.Accelerator):
        with looking_often():
            require_that_some_ranks_save(kind(cpu=True), Path(f"by_rank_0 {kind.__module__}"))


def require_that_some_ranks_save(accelerator: Accelerator, target: Path) -> None:
    """Save on rank 0 alone, beside another call, and on others; load it on all."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    hooked: list[str] = []
    note = lambda models, *_: hooked.extend(type(one).__name__ for one in models)  # noqa: E731
    accelerator.register_save_state_pre_hook(note)
    accelerator.register_load_state_pre_hook(note)
    later, some, whole = (Path(f"{target} {name}") for name in ("later", "some", "all"))

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
    assert len(places_in(notes.getvalue())) == notes.getvalue().count("\n") == int(RANK == 0)
    if RANK == 0:
        accelerator.save_state(later)
    accelerator.wait_for_everyone()
    if RANK == WORLD - 1:
        require_refusal(lambda: accelerator.save_state(target))
    step()
    if RANK in (0, WORLD - 1):
        accelerator.save_state(some)
    accelerator.wait_for_everyone()
    accelerator.save_state(whole)
    with redirect_stderr(io.StringIO()) as notes:
        accelerator.load_state(target)
    assert notes.getvalue().count("\n") == notes.getvalue().count(str(target)) == int(RANK == 0)
    assert model.module.weight.tolist() == saved
    step()
    assert len({str(one) for one in accelerator.gather(model.module.weight.detach())}) == 1
    assert [one.name for one in (target / "weights").iterdir()] == ["model.safetensors"]
    num_some = 2 if WORLD == 2 else 1  # ranks 0 and the last are all of two
    for folder, parts in ((target, 1), (later, 1), (some, num_some), (whole, WORLD)):
        manifest = read_manifest(folder)
        assert sum(file.path.startswith("values_rank") for file in manifest.files) == parts
        assert manifest.world_size == WORLD
    assert len(hooked) >= 2  # with models as before prepare(); DDP wraps Accelerate's later
    assert {*hooked} == {"Linear"}


@with_ranks(3)
def test_save_state_without_rank_0_is_refused_though_rank_0_has_saved_alone_before() -> None:
    accelerator = Accelerator(cpu=True)
    with looking_often():
        if RANK == 0:
            accelerator.save_state("before")
        accelerator.wait_for_everyone()
        if RANK == 2:
            require_refusal(lambda: accelerator.save_state("after"))
        dist.all_reduce(torch.ones(1))


@with_ranks(3)
def test_ranks_0_and_2_of_3_save_in_a_loop_whichever_is_late() -> None:
    """Where rank 1 exchanges data meanwhile."""
    accelerator = compat.Accelerator(cpu=True)
    exchanges: Calls = {
        "torch's": lambda: dist.all_reduce(torch.ones(1)),
        "a gather": lambda: accelerator.gather(torch.ones(1)),
    }
    with looking_often():
        for late in (0, 2):
            for name, exchange in exchanges.items():
                folder = Path(f"late {late} {name}")
                if late == RANK:
                    time.sleep(20 * meeting._LOOK_EVERY_S)
                if RANK != 1:
                    accelerator.save_state(folder)
                for _step in range(2):
                    exchange()
                assert read_manifest(folder).num_parts == 1


@with_ranks(2, 3)
def test_a_training_that_ends_by_an_error_waits_for_no_other_rank() -> None:
    accelerator = Accelerator(cpu=True)

    def end_by_an_error() -> None:
        try:
            raise KeyError
        finally:
            if RANK == 0:
                meeting.meet_to_end("end_training()")
            accelerator.wait_for_everyone()

    with looking_often(), pytest.raises(KeyError) as ended:
        end_by_an_error()
    assert ended.value.__context__ is None


@with_ranks(2, 3)
def test_all_ranks_go_on_at_the_next_sample_of_a_checkpoint_that_rank_0_saved_alone() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(24), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    went_on: list[int] = []
    with looking_often():
        for number, batch in enumerate(loader):
            if number > 1:
                went_on += batch.tolist()
            if number == 1:
                if RANK == 0:
                    accelerator.save_state("samples")
                dist.all_reduce(torch.ones(1))  # as in a backward pass
    accelerator.load_state("samples")
    assert [one for batch in loader for one in batch.tolist()] == went_on != []


@with_ranks(2, 3)
def test_a_rank_that_is_only_slow_is_waited_for() -> None:
    """Also after messages to another one."""
    accelerator = Accelerator(cpu=True)
    with looking_often():
        if WORLD == 3 and RANK == 1:
            dist.send(torch.ones(1), 2)
        if WORLD == 3 and RANK == 2:
            dist.recv(torch.ones(1), 1)
        if RANK == WORLD - 1:
            time.sleep(10 * meeting._LOOK_EVERY_S)
        accelerator.wait_for_everyone()
    assert of_all_ranks(RANK) == [*range(WORLD)]


LEAVING = """
import sys, time, torch
from headway import Accelerator
call = sys.argv[1]
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(2, 1))
if accelerator.process_index != 1:
    if call == "save_state":
        if not accelerator.is_main_process:
            time.sleep(5)  # until rank 0 has left, too
        print("saved", accelerator.save_state("ended"))
        accelerator.end_training()
        accelerator.save_state("after_end")
    elif accelerator.is_main_process:
        accelerator.wait_for_everyone()
"""


@pytest.mark.parametrize("call", ["save_state", "wait_for_everyone"])
def test_ranks_0_and_2_save_and_end_where_others_have_ended_and_wait_for_none_of_them(
    call: str,
) -> None:
    done = launch("-q", "--cpu", "--num-processes", "3", script(LEAVING), call)
    assert done.stdout.count("saved ended") == (2 if call == "save_state" else 0), done.stderr
    assert done.returncode == (0 if call == "save_state" else 2), done.stderr
    assert ("UsageError" in done.stderr) == (call == "wait_for_everyone")
    for path in Path().glob("*/manifest.json"):
        manifest = read_manifest(path.parent)
        assert (manifest.num_parts, manifest.world_size) == (1, 3), path
    assert len([*Path().glob("*/manifest.json")]) == (2 if call == "save_state" else 0)
