"""What one, two and three real ranks (gloo) know of each other, tell each other, and do in turn."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.compat import Accelerator as CompatAccelerator
from headway.distributed.collectives import DifferentTensors, gather_uneven
from headway.errors import UsageError
from headway.state import AcceleratorState, PartialState
from headway.utils import (
    InitProcessGroupKwargs,
    ProfileKwargs,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from tests.distributed.in_ranks import (
    RANK,
    WORLD,
    marks,
    of_all_ranks,
    run_in_ranks,
    with_ranks,
)

pytestmark = marks(__name__)


@with_ranks(1, 3, long=(2,))
def test_collectives_agree_with_arithmetic() -> None:
    accelerator = Accelerator()
    last = WORLD - 1
    found = gather({"a": [torch.tensor([[RANK, RANK]])], "b": (torch.tensor(RANK),)})
    assert found["a"][0].tolist() == [[rank, rank] for rank in range(WORLD)]
    assert gather(torch.tensor(RANK)).tolist() == list(range(WORLD))
    assert gather_object([f"rank {RANK}"]) == [f"rank {rank}" for rank in range(WORLD)]
    assert accelerator.reduce(torch.tensor([1.0, RANK])).tolist() == [WORLD, sum(range(WORLD))]
    assert reduce(torch.tensor(RANK)).item() == (WORLD - 1) / 2
    assert reduce(torch.tensor(2), "sum", scale=0.5).item() == WORLD
    true, most = torch.tensor([True, RANK == 0]), torch.tensor(200, dtype=torch.uint8)
    for own, total in ((true, [WORLD, 1]), (most, 200 * WORLD)):
        assert (found := reduce(own, "sum")).dtype == torch.int64
        assert found.tolist() == total
    if WORLD > 1:
        assert reduce(true).tolist() == pytest.approx([1, 1 / WORLD])
        assert reduce(most).item() == 200
    half = reduce(torch.tensor(40000.0, dtype=torch.float16))
    assert (half.item(), half.dtype) == (40000, torch.float16)
    assert broadcast([torch.tensor(RANK)], from_process=last)[0].item() == last
    objects = broadcast_object_list([f"rank {RANK}", RANK], from_process=last)
    assert objects == [f"rank {last}", last]


@with_ranks(1, 3, long=(2,))
def test_tensors_are_padded_to_the_longest() -> None:
    ragged = torch.ones(RANK + 1, 2)
    padded = pad_across_processes(ragged, pad_index=7).tolist()
    assert padded == [[1, 1]] * (RANK + 1) + [[7, 7]] * (WORLD - RANK - 1)
    first = Accelerator().pad_across_processes(ragged, pad_first=True)[0].tolist()
    assert first == ([1, 1] if RANK == WORLD - 1 else [0, 0])
    assert pad_across_processes(torch.tensor(3.0), dim=1).item() == 3.0
    for own, index in ((ragged.bool(), -100), (ragged.byte(), -100), (ragged.long(), 0.5)):
        with pytest.raises(UsageError, match=rf"{index}, which {own.dtype} cannot represent"):
            pad_across_processes(own, pad_index=index)


@with_ranks(3, long=(2,))
def test_tensors_that_differ_between_ranks_are_refused_on_all_of_them() -> None:
    Accelerator()
    last = int(RANK == WORLD - 1)
    longer, deeper = torch.ones(1 + last), torch.ones([1] * (1 + last))
    more = [longer[:1]] * (1 + last)
    typed = torch.ones(1, dtype=torch.float64 if last else torch.float32)
    cases: list[tuple[Callable[[], object], str, str]] = [
        (lambda: gather({"x": longer}), "float32[1]", "float32[2]"),
        (lambda: gather(more), "float32[1]", "float32[1], float32[1]"),
        (lambda: gather(typed), "float32[1]", "float64[1]"),
        (lambda: gather_uneven(torch.ones(1, 1 + last)), "float32[any, 1]", "float32[any, 2]"),
        (lambda: pad_across_processes(deeper), "float32[any]", "float32[any, 1]"),
        (lambda: reduce(longer), "float32[1]", "float32[2]"),
        (lambda: broadcast(longer), "float32[1]", "float32[2]"),
        (lambda: reduce([{"ab"[last]: typed.float()}]), "['a'] float32[1]", "['b'] float32[1]"),
    ]
    for call, of_first, of_last in cases:
        with pytest.raises(DifferentTensors) as refused:
            call()
        assert f"{of_first} on rank 0" in str(refused.value)
        assert f"{of_last} on rank {WORLD - 1}" in str(refused.value)
    values = {"a": torch.tensor([1.0]), "b": torch.tensor([10.0])}
    other_order = dict(reversed(values.items())) if last else values
    for result in (reduce(other_order, "max"), broadcast(other_order), gather(other_order)):
        assert {name: int(numbers.max()) for name, numbers in result.items()} == {"a": 1, "b": 10}
        assert [*result] == [*other_order]


@with_ranks(3, long=(2,))
def test_the_device_mesh_is_of_all_ranks_and_makes_no_group_of_its_own() -> None:
    mesh = Accelerator().world.mesh(data=WORLD)
    assert (mesh.get_local_rank("data"), mesh.size()) == (RANK, WORLD)
    assert mesh.get_group("data") is dist.group.WORLD


@with_ranks(1, 3, long=(2,))
def test_each_rank_knows_its_place_and_its_turn() -> None:
    accelerator = Accelerator()
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            time.sleep(0.2)
            Path("first").touch()
        assert Path("first").exists()
    is_first, is_last = RANK == 0, RANK == WORLD - 1
    assert accelerator.on_main_process(lambda: RANK)() == (0 if is_first else None)
    on_last = accelerator.on_process(lambda: RANK, process_index=WORLD - 1)
    for wrong in (-1, WORLD) if WORLD > 1 else ():
        with pytest.raises(UsageError, match=f"{wrong} for .*index: must be a number from 0 to"):
            accelerator.on_process(print, process_index=wrong)
        with pytest.raises(UsageError, match=f"{wrong} for .*index: must be a number from 0 to"):
            accelerator.on_local_process(print, local_process_index=wrong)
    CompatAccelerator().on_process(print, process_index=WORLD)  # as in Accelerate
    assert on_last() == accelerator.on_last_process(lambda: RANK)() == (RANK if is_last else None)
    assert accelerator.is_last_process == is_last
    assert accelerator.distributed_type == ("NO" if WORLD == 1 else "MULTI_CPU")
    assert (accelerator.process_index, accelerator.num_processes) == (RANK, WORLD)
    assert str(accelerator.device) == "cpu"
    accelerator.save({"rank": RANK}, Path("saved.pt"))
    accelerator.wait_for_everyone()
    assert torch.load("saved.pt") == {"rank": 0}


@with_ranks(1, 3, long=(2,))
def test_ranks_take_their_turns_though_the_first_one_leaves_by_an_error() -> None:
    accelerator = Accelerator()
    with contextlib.suppress(OSError), accelerator.main_process_first():
        Path("in turn").touch()
        if accelerator.is_main_process:
            raise OSError("no network")
        assert Path("in turn").exists()
    accelerator.wait_for_everyone()


@with_ranks(1, 3, long=(2,))
def test_what_is_for_each_machine_s_first_rank_happens_there_first_and_only_there() -> None:
    accelerator = Accelerator()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        accelerator.print("once")
    with accelerator.local_main_process_first():
        if accelerator.is_local_main_process:
            time.sleep(0.3)
            Path("local first").touch()
        assert Path("local first").exists()
    assert printed.getvalue() == ("once\n" if RANK == 0 else "")
    assert accelerator.on_local_main_process(lambda: RANK)() == (0 if RANK == 0 else None)


@with_ranks(1, 3, long=(2,))
def test_a_state_made_before_the_accelerator_has_its_ranks() -> None:
    state = PartialState()
    accelerator = Accelerator()
    indices = (state.process_index, state.num_processes, state.local_process_index)
    assert indices == (RANK, WORLD, RANK)
    flags = (state.is_main_process, state.is_last_process, state.use_distributed)
    assert flags == (RANK == 0, RANK == WORLD - 1, WORLD > 1)
    assert state.world.ranks == accelerator.world.ranks
    assert AcceleratorState().backend == (None if WORLD == 1 else "gloo")
    on_first = state.on_local_process(lambda: RANK, local_process_index=0)
    assert on_first() == (0 if RANK == 0 else None)


@with_ranks(1, 3, long=(2,))
def test_the_state_s_text_has_the_usual_lines() -> None:
    kind = "DistributedType." + ("NO" if WORLD == 1 else "MULTI_CPU")
    kind += "  Backend: gloo" if WORLD > 1 else ""
    assert repr(Accelerator().state).split("\n") == [
        f"Distributed environment: {kind}",
        f"Num processes: {WORLD}",
        f"Process index: {RANK}",
        f"Local process index: {RANK}",
        "Device: cpu",
        "",
        "Mixed precision type: no",
        "",
    ]


def part_of(inputs: Any, *, padded: bool = False) -> Any:
    accelerator = Accelerator()
    with accelerator.split_between_processes(inputs, apply_padding=padded) as part:
        return part


@with_ranks(1, 3, long=(2,))
def test_parts_of_inputs_are_consecutive_and_complete() -> None:
    deep = part_of({"x": list("abcd"), "deep": {"y": torch.arange(8).view(4, 2)}})
    for mine in (part_of(list("abcd")), deep["x"]):
        parts = of_all_ranks(mine)
        assert list(chain.from_iterable(parts)) == list("abcd")
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    rows = chain.from_iterable(of_all_ranks(deep["deep"]["y"].tolist()))
    assert list(rows) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert of_all_ranks(part_of(["only"])) == [["only"], *([[]] * (WORLD - 1))]


@with_ranks(3)
def test_padded_parts_are_equally_long_and_repeat_the_last_element() -> None:
    for letters in (list("abcd"), tuple("abcd")):
        part = part_of(letters, padded=True)
        assert list(part) == [["a", "b"], ["c", "d"], ["d", "d"]][RANK]
    part = part_of(torch.arange(4), padded=True)
    assert part.tolist() == [[0, 1], [2, 3], [3, 3]][RANK]


@with_ranks(1, 3, long=(2,))
def test_a_trigger_of_one_rank_is_seen_once_by_all() -> None:
    accelerator = Accelerator()
    assert not accelerator.check_trigger()
    if RANK == WORLD - 1:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


@with_ranks(1, 3, long=(2,))
def test_every_rank_writes_its_own_trace() -> None:
    accelerator = Accelerator()
    with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir="traces")):
        torch.ones(2) + 1
    assert Path("traces", f"profile_{RANK}.json").exists()


def timeout_s() -> float:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    return float(backend.options._timeout.total_seconds())


@with_ranks(3, long=(2,))
def test_the_timeout_reaches_a_group_that_exists_but_another_backend_is_refused() -> None:
    Accelerator()
    assert timeout_s() == 1800
    Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=77))])
    assert timeout_s() == 77
    with pytest.raises(UsageError):
        Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="mpi")])


@with_ranks(3, long=(2,))
def test_a_new_group_is_as_the_handler_describes_it() -> None:
    """The last check, for the group of all before is gone."""
    Accelerator().end_training()
    place = f"file://{Path('meeting').absolute()}"
    handler = InitProcessGroupKwargs("gloo", init_method=place, timeout=timedelta(seconds=55))
    accelerator = Accelerator(kwargs_handlers=[handler])
    assert accelerator.reduce(torch.ones(1)).item() == WORLD
    assert (timeout_s(), accelerator.state.backend) == (55, "gloo")


def train_as_a_worker_of_another_framework() -> tuple[list[float], list[float]]:
    """Return the samples and weights of a worker that has a process group, as in Ray Train."""
    dist.init_process_group("gloo", init_method="env://", rank=RANK, world_size=WORLD)
    accelerator = Accelerator(cpu=True)
    assert (accelerator.process_index, accelerator.num_processes) == (RANK, WORLD)
    torch.manual_seed(RANK)
    model = torch.nn.Linear(1, 1)
    data = DataLoader(TensorDataset(torch.arange(8.0)[:, None]), batch_size=2)
    model, optimizer, data = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), data
    )
    samples: list[float] = []
    for (batch,) in data:
        samples += batch.flatten().tolist()
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return samples, [value.item() for value in model.state_dict().values()]


def test_an_accelerator_takes_the_process_group_that_a_framework_has_made(tmp_path: Path) -> None:
    first, second = run_in_ranks(2, tmp_path, train_as_a_worker_of_another_framework)
    assert sorted(first[0] + second[0]) == [float(n) for n in range(8)]
    assert first[1] == second[1]
