"""What the runtime does on one, two and three real ranks (gloo). See runtime_worker.py."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import pytest

from tests.distributed.launching import launch, script
from tests.distributed.ranks import Seen

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("seen_with")]
every_world = pytest.mark.parametrize("world", [1, 2, 3])
several_ranks = pytest.mark.parametrize("world", [2, 3])


@several_ranks
@pytest.mark.parametrize("accumulation", ["1", "2"])
def test_same_global_batch_gives_the_same_weights_with_any_number_of_ranks(
    seen_with: Callable[[int], Seen], world: int, accumulation: str
) -> None:
    alone = seen_with(1)[0]["weights"]["1"]
    for rank in seen_with(world):
        assert rank["weights"][accumulation] == pytest.approx(alone, abs=1e-6)


@several_ranks
def test_ranks_end_alike_after_a_batch_that_cannot_be_shared_out_evenly(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    first, *others = (rank["weights_after_an_uneven_batch"] for rank in seen_with(world))
    assert others == [first] * (world - 1)


@every_world
def test_gather_for_metrics_keeps_rows_of_a_sample_together_and_scalars_whole(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    for rank in seen_with(world):
        found = rank["metrics_of_several_rows_and_scalars"]
        assert found["rows"] == [sample for sample in range(17) for _ in range(3)]
        assert found["scalars"]


@every_world
def test_loader_workers_lose_and_repeat_nothing(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    for rank in seen_with(world):
        found = rank["worker_processes"]
        for kind in ("map", "stream"):
            assert found[kind] == [list(range(11))] * 2
            assert found[f"{kind} attributes"] == [2, 2, 11]


@every_world
def test_an_unseeded_script_still_gets_disjoint_shards_that_change_each_epoch(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    epochs = list(zip(*(rank["shards"]["unseeded"] for rank in seen_with(world)), strict=True))
    for parts in epochs:
        assert sorted(chain.from_iterable(parts)) == list(range(24))
    assert epochs[0] != epochs[1]


@several_ranks
def test_rank_0_s_own_generator_orders_the_samples_of_all_ranks(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    parts = [rank["shards"]["own generator"] for rank in seen_with(world)]
    assert sorted(chain.from_iterable(parts)) == list(range(24))


@several_ranks
def test_one_seed_gives_one_order_of_samples_with_any_number_of_ranks(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    assert seen_with(world)[0]["shards"]["order"] == seen_with(1)[0]["shards"]["order"]


@several_ranks
def test_rank_r_gets_every_wth_batch(seen_with: Callable[[int], Seen], world: int) -> None:
    batches = [[first, first + 1] for first in range(0, 24, 2)]
    for index, rank in enumerate(seen_with(world)):
        assert rank["shards"]["batches"] == batches[index::world]


def test_drop_last_drops_the_round_that_is_not_whole(seen_with: Callable[[int], Seen]) -> None:
    found = [[rank["shards"]["drop_last"] for rank in seen_with(world)] for world in (1, 2, 3)]
    assert found[0] == [[4, [[0, 1], [2, 3], [4, 5], [6, 7]]]]
    assert found[1] == [[2, [[0, 1], [4, 5]]], [2, [[2, 3], [6, 7]]]]
    assert found[2] == [[1, [[0, 1]]], [1, [[2, 3]]], [1, [[4, 5]]]]


def test_batches_of_the_script_s_own_sizes_stay_whole(seen_with: Callable[[int], Seen]) -> None:
    two, three = ([rank["shards"]["buckets"] for rank in seen_with(world)] for world in (2, 3))
    assert two == [[[0], [3, 4, 5], [7]], [[1, 2], [6], [8]]]
    assert three == [[[0], [6]], [[1, 2], [7]], [[3, 4, 5], [8]]]


@every_world
def test_one_scheduler_step_per_optimizer_step(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    for rank in seen_with(world):
        assert rank["schedule"]["plain"] == [10, 10, 0.5, True]
        assert rank["schedule"]["split"] == [10, 10, 0.5, True]


@every_world
def test_the_last_incomplete_window_of_an_epoch_makes_a_step(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    for rank in seen_with(world):
        assert rank["schedule"]["3 of 10"] == [4, 4, 0.8, True]


@several_ranks
def test_gradients_stay_on_their_rank_until_they_are_due(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    for rank in seen_with(world):
        assert rank["gradients_while_accumulating"] == [False, True, False, True, True]


@every_world
def test_collectives_agree_with_arithmetic(seen_with: Callable[[int], Seen], world: int) -> None:
    for index, rank in enumerate(seen_with(world)):
        found = rank["collectives"]
        assert found["gather"] == [[one, one] for one in range(world)]
        assert found["scalar"] == list(range(world))
        assert found["objects"] == [f"rank {one}" for one in range(world)]
        assert found["sum"] == [world, sum(range(world))]
        assert found["mean"] == (world - 1) / 2
        assert found["scaled"] == world
        assert found["broadcast"] == world - 1
        assert found["list"] == [f"rank {world - 1}", world - 1]
        assert found["padded"] == [[1, 1]] * (index + 1) + [[7, 7]] * (world - index - 1)
        assert found["padded first"] == ([1, 1] if index == world - 1 else [0, 0])
        assert found["untouched"] == 3.0


@several_ranks
def test_tensors_that_differ_between_ranks_are_refused_on_all_of_them(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    expected = {
        "gather": ("float32[1]", "float32[2]"),
        "gather more": ("float32[1]", "float32[1], float32[1]"),
        "gather types": ("float32[1]", "float64[1]"),
        "uneven": ("float32[any, 1]", "float32[any, 2]"),
        "pad_across_processes": ("float32[any]", "float32[any, 1]"),
        "reduce": ("float32[1]", "float32[2]"),
        "broadcast": ("float32[1]", "float32[2]"),
    }
    for rank in seen_with(world):
        assert rank["different_tensors"].keys() == expected.keys()
        for name, (first, last) in expected.items():
            said = rank["different_tensors"][name]
            assert f"{first} on rank 0" in said
            assert f"{last} on rank {world - 1}" in said


@several_ranks
def test_the_device_mesh_is_of_all_ranks_and_makes_no_group_of_its_own(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    for index, rank in enumerate(seen_with(world)):
        assert rank["mesh"] == [index, world, True]


@every_world
def test_each_rank_knows_its_place_and_its_turn(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    for index, rank in enumerate(seen_with(world)):
        found = rank["order_of_ranks"]
        assert found["main"] == (0 if index == 0 else None)
        assert found["last"] == (index if index == world - 1 else None)
        assert found["is last"] == (index == world - 1)
        assert found["saved"] == {"rank": 0}
        assert found["type"]
        assert found["place"] == [index, world, "cpu"]


@several_ranks
def test_loaders_that_cannot_be_shared_out_are_refused_with_a_way_out(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    for rank in seen_with(world):
        assert "shared out twice" in rank["refusals"]["twice"]
        assert f"multiple of {world}" in rank["refusals"]["split"]
        assert "Loops has an __iter__ of its own" in rank["refusals"]["own iter"]


@every_world
def test_a_loss_repeated_to_the_batch_size_counts_each_sample_once(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    for rank in seen_with(world):
        found = rank["repeated_losses"]
        assert found["map"] == found["stream"] == [21, 84, 21]
        assert found["few"][0] == found["few"][2] == 2


@every_world
def test_metrics_are_exact_in_uneven_and_nested_rounds_and_for_any_accelerator(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    for rank in seen_with(world):
        found = rank["metrics_of_uneven_rounds"]
        for kind in ("short", "buckets", "nested", "other"):
            assert found[kind] == list(range(9))


@every_world
def test_streams_that_differ_between_ranks_are_refused_on_all_of_them(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    for rank in seen_with(world):
        said = rank["unlike_streams"]
        if world == 1:
            assert said == [""] * 4
            continue
        assert [one.partition(" give different ")[2].partition(",")[0] for one in said] == [
            *("samples", "samples", "samples", "lengths")
        ]
        assert all("set_seed(...)" in one and "leave its loader out" in one for one in said)


@every_world
def test_rank_0_reads_for_all_where_batches_are_dispatched(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    ready = [[one, one + 1] for one in range(0, 10, 2)]
    ready += ready[: -len(ready) % world]  # each rank gets one in the last round
    found = [rank["dispatched"] for rank in seen_with(world)]
    for index, rank in enumerate(found):
        assert rank["objects"] == [["from 0", batch] for batch in ready[index::world]]
        assert rank["stream"] == [[one, one + 1] for one in range(0, 12, 2)][index::world]
        assert rank["workers"][0] == [2 * index, 2 * index + 1]
        assert rank["texts"] == [str(one) for one in range(7)]
        assert rank["skipped"] == [-(-4 // world) - 1] * 2
    shuffled = [one for rank in found for batch in rank["shuffled"] for one in batch]
    assert sorted(shuffled) == list(range(12))


@every_world
def test_rank_0_s_seed_orders_the_samples_of_all_ranks(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    parts = [rank["seeded_orders_of_unseeded_ranks"] for rank in seen_with(world)]
    assert sorted(chain.from_iterable(parts)) == list(range(12))


@every_world
def test_a_sampler_without_generator_is_left_without(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    assert all(rank["sampler_is_left_as_it_was"] for rank in seen_with(world))


@every_world
def test_weights_are_saved_under_the_names_of_one_process(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    for rank in seen_with(world):
        found = rank["names_of_weights"]
        for name in ("plain", "compiled after", "compiled before"):
            assert found[name] == found[f"{name}, unwrapped"] == ["0.weight", "0.bias"]


@several_ranks
def test_each_rank_goes_on_with_its_own_buffers_from_a_checkpoint(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    ranks = [one["buffers_after_loading"] for one in seen_with(world)]
    for found in ranks:
        for name in ("after training", "after a pass without gradients"):
            assert found[f"{name}, loaded"] == found[f"{name}, saved"]
    before, _, after = zip(
        *(one["after a pass without gradients, saved"] for one in ranks), strict=True
    )
    assert len({*map(tuple, before)}) == len({*map(tuple, after)}) == world, "DDP leaves them"


@several_ranks
def test_accumulate_holds_back_the_models_it_is_given_compiled_or_not(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    for rank in seen_with(world):
        assert rank["gradients_of_two_models"] == {"a": False, "b": True, "c": False}


@several_ranks
@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-5), ("bf16", 0.05)])
def test_two_models_with_an_optimizer_each_train_alike_with_any_number_of_ranks(
    seen_with: Callable[[int], Seen], world: int, precision: str, tolerance: float
) -> None:
    alone = seen_with(1)[0]["weights_of_two_models"][precision]
    ranks = [rank["weights_of_two_models"][precision] for rank in seen_with(world)]
    assert ranks == [ranks[0]] * world
    assert ranks[0] == pytest.approx(alone, abs=tolerance)


@every_world
def test_what_is_for_each_machine_s_first_rank_happens_there_first_and_only_there(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    first, *others = (rank["once_on_each_machine"] for rank in seen_with(world))
    assert first == {"printed": "once\n", "local main": 0, "first was there": True}
    for other in others:
        assert other == {"printed": "", "local main": None, "first was there": True}


def test_a_model_that_outlives_its_group_does_not_wait_for_good() -> None:
    """Torch's reducer waits for gloo's threads while it has Python's lock, and they want it too."""
    text = (
        "import sys, torch\n"
        "from headway import Accelerator\n"
        "sys.setswitchinterval(3)  # no thread gets Python's lock in passing\n"
        "def main():\n"
        "    accelerator = Accelerator()\n"
        "    model = accelerator.prepare(torch.nn.Linear(4, 4))\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    for _ in range(20):\n"
        "        tensors = accelerator.gather((torch.ones(8), torch.ones(8)))\n"
        "    accelerator.end_training()\n"
        "main()\n"
    )
    done = launch("-q", "--cpu", "--num-processes", "4", script(text), timeout_s=60)
    assert done.returncode == 0, done.stderr


@every_world
def test_the_batch_size_that_the_rank_with_least_memory_can_use_is_that_of_all(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    for rank in seen_with(world):
        found = rank["batch_size_of_the_rank_with_least_memory"]
        assert found == {"tried": [64, 32, 16, 16], "ranks": world}


OUT_OF_MEMORY_ALONE = """
import torch
from headway import Accelerator, find_executable_batch_size
accelerator = Accelerator(cpu=True)
@find_executable_batch_size(starting_batch_size=64)
def train(batch_size):
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    if accelerator.process_index == 1:
        raise torch.OutOfMemoryError
    accelerator.backward(model(torch.ones(1, 2)).mean())
train()
"""


def test_out_of_memory_on_a_rank_for_which_others_wait_in_a_collective_ends_the_run() -> None:
    done = launch("-q", "--cpu", "--num-processes", "2", script(OUT_OF_MEMORY_ALONE), timeout_s=60)
    assert done.returncode == 2, done.stderr
    assert "OutOfMemory: memory ran out on this rank alone: rank 1 waits in" in done.stderr
    assert "smaller starting_batch_size" in done.stderr


@every_world
def test_the_gradient_is_that_of_the_mean_over_all_tokens_however_they_are_shared_out(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    alone = seen_with(1)[0]["gradients_of_the_token_mean"]
    for rank in seen_with(world):
        found = rank["gradients_of_the_token_mean"]
        for way in ("accumulate", "no_sync"):
            for steps in (1, 3):
                expected = alone["1 accumulate"]
                assert found[f"{steps} {way}"] == pytest.approx(expected, rel=1e-9)
        assert found["3 clip"] == pytest.approx(alone["1 clip"], rel=1e-9)


@every_world
def test_batches_in_parts_that_fit_into_memory_give_the_same_weights(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    alone = seen_with(1)[0]["weights_with_parts_of_batches"]
    for rank in seen_with(world):
        found = rank["weights_with_parts_of_batches"]
        assert max(found["sizes"][-8:]) <= 3
        for steps in (1, 2):
            for by_tokens in (False, True):
                for way in ("whole", "parts"):
                    expected = pytest.approx(alone[f"{steps} whole False"], rel=1e-9)
                    assert found[f"{steps} {way} {by_tokens}"] == expected
