"""What states and handlers do on one, two and three real ranks (gloo). See runtime_worker.py."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import pytest

from headway.utils import DistributedType
from tests.distributed.ranks import Seen

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("seen_with")]
every_world = pytest.mark.parametrize("world", [1, 2, 3])
several_ranks = pytest.mark.parametrize("world", [2, 3])
SeenWith = Callable[[int], Seen]


@every_world
def test_a_state_made_before_the_accelerator_has_its_ranks(seen_with: SeenWith, world: int) -> None:
    for rank, found in enumerate(one["states"] for one in seen_with(world)):
        assert found["place"] == [rank, world, rank]
        assert found["flags"] == [rank == 0, rank == world - 1, world > 1]
        assert found["same"]
        assert found["backend"] == (None if world == 1 else "gloo")
        assert found["last"] == (rank if rank == world - 1 else None)
        assert found["local"] == (rank if rank == 0 else None)


@every_world
def test_the_state_s_text_has_the_usual_lines(seen_with: SeenWith, world: int) -> None:
    kind = f"{DistributedType.NO if world == 1 else DistributedType.MULTI_CPU}"
    kind += "  Backend: gloo" if world > 1 else ""
    for rank, one in enumerate(seen_with(world)):
        assert one["states"]["text"] == [
            f"Distributed environment: {kind}",
            f"Num processes: {world}",
            f"Process index: {rank}",
            f"Local process index: {rank}",
            "Device: cpu",
            "",
            "Mixed precision type: no",
            "",
        ]


@every_world
def test_parts_of_inputs_are_consecutive_and_complete(seen_with: SeenWith, world: int) -> None:
    parts = [one["parts"] for one in seen_with(world)]
    for found in ([one["list"] for one in parts], [one["dict"]["x"] for one in parts]):
        assert list(chain.from_iterable(found)) == list("abcd")
        assert max(map(len, found)) - min(map(len, found)) <= 1
    rows = chain.from_iterable(one["dict"]["deep"]["y"] for one in parts)
    assert list(rows) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [one["few"] for one in parts] == [["only"], *([[]] * (world - 1))]


def test_padded_parts_are_equally_long_and_repeat_the_last_element(seen_with: SeenWith) -> None:
    parts = [one["parts"] for one in seen_with(3)]
    for kind in ("padded", "tuple"):
        assert [one[kind] for one in parts] == [["a", "b"], ["c", "d"], ["d", "d"]]
    assert [one["tensor"] for one in parts] == [[0, 1], [2, 3], [3, 3]]


@every_world
def test_a_trigger_of_one_rank_is_seen_once_by_all(seen_with: SeenWith, world: int) -> None:
    assert [one["triggers"] for one in seen_with(world)] == [[False, True, False]] * world


@several_ranks
def test_find_unused_parameters_reaches_ddp(seen_with: SeenWith, world: int) -> None:
    for one in seen_with(world):
        assert one["unused_parameters"] == {"False": False, "True": True}


@several_ranks
def test_gradients_are_exchanged_by_the_hook(seen_with: SeenWith, world: int) -> None:
    mean = 1.01 * (world + 1) / 2
    for one in seen_with(world):
        found = one["gradients_by_hook"]
        assert found["no"] == pytest.approx(mean, abs=1e-6)
        assert found["fp16"] != found["no"]
        assert found["fp16"] == pytest.approx(mean, abs=1e-3)
        assert found["power_sgd"] == pytest.approx(mean, abs=1e-4)


@several_ranks
def test_hooks_that_torch_cannot_run_are_refused(seen_with: SeenWith, world: int) -> None:
    for one in seen_with(world):
        found = one["gradients_by_hook"]
        assert found["batched_power_sgd"] == found["bf16"] == "refused"


@several_ranks
def test_the_timeout_reaches_the_group_even_an_existing_one(
    seen_with: SeenWith, world: int
) -> None:
    for one in seen_with(world):
        assert one["timeout_of_the_group"] == [1800, 77]
        assert one["other_backend"]
        assert one["formed_group"] == [55, "gloo", world]


@several_ranks
def test_sync_each_batch_exchanges_gradients_of_every_micro_batch(
    seen_with: SeenWith, world: int
) -> None:
    for one in seen_with(world):
        assert one["exchanged_micro_batches"] == {
            "False": [False, True, False, True],
            "True": [True] * 4,
        }


@several_ranks
def test_an_exchange_can_be_triggered_in_the_last_of_several_backward_passes(
    seen_with: SeenWith, world: int
) -> None:
    for one in seen_with(world):
        assert one["triggered_exchange"] == [False, True]


@every_world
def test_a_model_for_evaluation_exchanges_nothing(seen_with: SeenWith, world: int) -> None:
    for one in seen_with(world):
        assert one["models_for_evaluation"] == "Linear"


@every_world
def test_compiled_models_train_alike_and_keep_the_names_of_their_weights(
    seen_with: SeenWith, world: int
) -> None:
    names = ["0.0.weight", "0.0.bias", "1.0.weight", "1.0.bias"]
    for one in seen_with(world):
        assert one["compiled_models"] == {"False": [True, names], "True": [True, names]}


@every_world
def test_every_rank_writes_its_own_trace(seen_with: SeenWith, world: int) -> None:
    for one in seen_with(world):
        assert one["traces"] == [f"profile_{rank}.json" for rank in range(world)]
