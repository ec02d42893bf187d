"""Calls of which all ranks take part, made by some only: no rank waits for ever."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from headway import Accelerator
from headway.data.configuration import DataLoaderConfiguration
from headway.distributed import call_barrier
from headway.errors import UsageError
from headway.utils import broadcast_object_list, gather_object
from tests.data.streams import Stream
from tests.distributed.in_ranks import RANK, WORLD, marks, of_all_ranks, with_ranks
from tests.distributed.launching import launch, script

pytestmark = marks(__name__)
Calls = dict[str, Callable[[], object]]


@contextmanager
def looking_often() -> Iterator[None]:
    before, call_barrier._CHECK_EVERY_S = call_barrier._CHECK_EVERY_S, 0.05
    try:
        yield
    finally:
        call_barrier._CHECK_EVERY_S = before


def require_refusal(call: Callable[[], object], name: str = "") -> None:
    """Require an error that names both places."""
    with pytest.raises(UsageError) as refused:
        call()
    places = re.findall(rf"{Path(__file__).name}:\d+", str(refused.value))
    assert len({*places}) == 2, (name, refused.value)
    fix = refused.value.problems[0].fix
    assert "check_trigger" in fix  # what a `break` on one rank needs
    is_in_torch = "is in a torch collective" in str(refused.value)
    for cause in ("skipped a backward()", "join_uneven_inputs([model])"):
        assert (cause in fix) == is_in_torch, (name, refused.value)
    assert "synced_gpus=True" in fix or not (is_in_torch and "of shards" in name), fix


def calls_of_all(accelerator: Accelerator) -> Calls:
    one = torch.ones(1)
    model, optimizer = torch.nn.Linear(2, 1), torch.optim.SGD([one.requires_grad_()], lr=0.1)
    accelerator.prepare(optimizer)
    dispatching = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
    )
    shuffled = accelerator.prepare(DataLoader(range(8), shuffle=True))  # type: ignore[arg-type]
    dispatched = dispatching.prepare(DataLoader(range(8)))  # type: ignore[arg-type]
    streamed = accelerator.prepare(DataLoader(Stream(range(8))))
    accelerator.save_state("background", wait=False)

    def in_a_block() -> None:
        with accelerator.main_process_first():
            pass

    return {
        "save_state": lambda: accelerator.save_state("by some"),
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

    def read_full() -> None:
        with accelerator.unsharded(model):
            pass

    return {
        "save_state of shards": lambda: accelerator.save_state("shards"),
        "get_state_dict of shards": lambda: accelerator.get_state_dict(model),
        "save_model of shards": lambda: accelerator.save_model(model, "shards"),
        "whole of shards": read_full,
        "clip_grad_norm_ of shards": lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
        "backward of tokens": lambda: accelerator.backward(losses.pop(), num_tokens=4),
    }


@with_ranks(3, long=(2,))
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
        others: Callable[[], object] = lambda: broadcast_object_list(["another call"])  # noqa: E731
        others = accelerator.wait_for_everyone if name == "broadcast_object_list" else others
        require_refusal(call if RANK == 0 else others, name)


@with_ranks(3, long=(2,))
def test_loops_over_loaders_of_different_kinds_name_both_places() -> None:
    configs = [{}, {"dispatch_batches": True}, {"already_sharded": True}]
    made = [Accelerator(dataloader_config=DataLoaderConfiguration(**each)) for each in configs]
    numbers = [torch.arange(24)[part] for part in (slice(None), slice(None), slice(RANK, None, 3))]
    datasets: list[tuple[Accelerator, Any]] = [*zip(made, numbers, strict=True)]
    datasets += [(made[0], torch.arange(24)), (made[0], Stream(range(24)))]
    with looking_often():
        for one, other in combinations(range(5), 2):
            loaders = [accelerator.prepare(DataLoader(data)) for accelerator, data in datasets]
            next(iter(loaders[3]))  # compares less from now on
            if RANK == 0:
                require_refusal(lambda: next(iter(loaders[one])), f"{one} {other}")  # noqa: B023
            else:
                require_refusal(lambda: next(iter(loaders[other])), f"{one} {other}")  # noqa: B023


@with_ranks(3, long=(2,))
def test_a_training_that_ends_by_an_error_waits_for_no_other_rank() -> None:
    accelerator = Accelerator(cpu=True)

    def end_by_an_error() -> None:
        try:
            raise KeyError
        finally:
            if RANK == 0:
                call_barrier.final_barrier("end_training()")
            accelerator.wait_for_everyone()

    with looking_often(), pytest.raises(KeyError) as ended:
        end_by_an_error()
    assert ended.value.__context__ is None


@with_ranks(3, long=(2,))
def test_a_rank_that_is_only_slow_is_waited_for_without_a_word() -> None:
    """Also after messages to another one; torch logs each wait of its own that times out."""
    accelerator = Accelerator(cpu=True)
    stderr, before = os.open(f"stderr_{RANK}", os.O_CREAT | os.O_RDWR), os.dup(2)
    os.dup2(stderr, 2)
    with looking_often():
        if WORLD == 3 and RANK == 1:
            dist.send(torch.ones(1), 2)
        if WORLD == 3 and RANK == 2:
            dist.recv(torch.ones(1), 1)
        if RANK == WORLD - 1:
            time.sleep(10 * call_barrier._CHECK_EVERY_S)
        accelerator.wait_for_everyone()
    assert of_all_ranks(RANK) == [*range(WORLD)]
    os.dup2(before, 2)
    assert os.fstat(stderr).st_size == 0


@with_ranks(3, long=(2,))
def test_rank_0_alone_saves_a_model_s_weights() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    if RANK == 0:
        accelerator.save_model(model, "weights")
        torch.save(accelerator.unwrap_model(model).state_dict(), "by_torch.pt")
        accelerator.save(accelerator.get_state_dict(model), "by_save.pt")
    accelerator.backward(model(torch.ones(1, 2)).sum())
    accelerator.wait_for_everyone()
    assert torch.load("by_torch.pt").keys() == torch.load("by_save.pt").keys()
    assert Path("weights", "model.safetensors").is_file()


@with_ranks(3, long=(2,))
def test_save_state_is_refused_after_the_group_has_ended() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.end_training()
    with pytest.raises(UsageError, match=r"save_state.*called by all \d ranks"):
        accelerator.save_state("after_end")


LEAVING = """
import sys
import torch
from headway import Accelerator
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(2, 1))
if accelerator.is_main_process:
    accelerator.save_state("ended")
elif len(sys.argv) > 1:
    raise KeyError("a")
"""


def test_a_rank_that_has_left_the_script_is_named() -> None:
    done = launch("-q", "--cpu", "--num-processes", "3", script(LEAVING), code=2)
    assert re.search(
        r"rank 0 is waiting in save_state\(\.\.\.\), but rank [12] has left", done.stderr
    )
    assert not Path("ended").exists()


def test_a_rank_that_waits_for_one_that_has_failed_ends_without_a_fix_of_its_own() -> None:
    done = launch("--cpu", "--num-processes", "2", script(LEAVING), "fails", code=1)
    assert "rank 1 of 2 failed with KeyError; rank 0 stopped after rank 1 failed" in done.stderr
    assert "UsageError" not in done.stderr


EXITING = """
import os, subprocess, sys
from headway import Accelerator
accelerator = Accelerator(cpu=True)
if len(sys.argv) == 1 and accelerator.is_main_process:
    child = subprocess.run([sys.executable, __file__, "child"], capture_output=True, text=True)
    print(child.returncode, child.stderr)
accelerator.wait_for_everyone()
if accelerator.process_index:
    os._exit(0)
accelerator.wait_for_everyone()
"""


def test_a_rank_that_exits_without_a_word_and_a_child_of_a_rank_are_named() -> None:
    done = launch("-q", "--cpu", "--num-processes", "2", script(EXITING), code=2)
    assert "rank 0 is waiting in wait_for_everyone(), but rank 1 has left [" in done.stderr
    assert re.search(r"rank 0 is process \d+, but process \d+ has the same RANK", done.stdout)
    assert "set another MASTER_PORT for each job" in done.stdout


@with_ranks(3, long=(2,))
def test_ranks_that_are_later_than_the_timeout_are_named() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    if RANK == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(call_barrier, "group_timeout", lambda: timedelta(seconds=0.2))
            with pytest.raises(UsageError, match=r"ranks? 1.* did not reach .* within") as late:
                accelerator.wait_for_everyone()
        assert "InitProcessGroupKwargs(timeout=" in late.value.problems[0].fix
    dist.barrier()
