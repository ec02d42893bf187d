"""Sharded training on 2 gloo ranks, and on 3 and 4: the numbers of one process, and its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headway import Accelerator
from tests.distributed.fsdp_checks import prepared, train
from tests.distributed.fsdp_parity import CASES
from tests.distributed.ranks import run_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.xdist_group("fsdp"),  # one worker starts its ranks
    pytest.mark.timeout(300),  # which may take LIMIT_S
]
FEW = ("gpt sgd 3", "mlp adamw 1")
"""The cases that are trained on 2 ranks in every run of the tests."""


@pytest.fixture(
    scope="module", params=[2, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 4))]
)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("ranks")
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator, seed=9)
    train(accelerator, model, optimizer)
    accelerator.save_state(folder / "of one rank")
    cases = FEW if request.param == 2 else CASES
    worker = Path(__file__).with_name("fsdp_worker.py")
    found = run_ranks(request.param, folder, worker, *cases, limit_s=600)
    assert not isinstance(found, str), found
    sum_of_one = sum(float(one.detach().double().sum()) for one in model.parameters())
    return found, folder, sum_of_one


def each(seen: Any, *path: str) -> list[Any]:
    """Return what is at `path` of what each rank saw."""
    found = seen[0]
    for name in path:
        found = [one[name] for one in found]
    return list(found)


def test_weights_gradients_and_norms_are_those_of_one_process(seen: Any) -> None:
    for rank in each(seen, "parity"):
        for case, differences in rank.items():
            # Adam amplifies differences of rounding where gradients are near zero
            limit = 1e-5 if "adamw" in case else 1e-6
            assert differences["weights"] <= limit, case
            assert differences["gradients"] <= 1e-6, case
            assert differences["norms"] <= 2e-6, case
            assert differences["learning rates"] == 0, case


def test_a_rank_holds_its_share_of_parameters_gradients_and_optimizer_state(seen: Any) -> None:
    memory = each(seen, "memory")
    for rank in memory:
        share = rank["model"] / len(memory)
        for name, copies in {"parameters": 1, "gradients": 1, "optimizer": 2}.items():
            assert rank[name] == pytest.approx(share * copies, rel=0.05), name


def test_sharding_takes_no_more_than_the_model_and_one_unit(seen: Any) -> None:
    for rank in each(seen, "memory"):
        assert rank["peak, made whole"] <= rank["model"] + rank["unit"]
        assert rank["after, made whole"] <= rank["parameters"] * 1.01, "the whole model is freed"


def test_a_model_made_empty_takes_no_more_than_its_share_and_one_unit(seen: Any) -> None:
    for rank in each(seen, "memory"):
        assert rank["made empty"]
        assert rank["peak, made empty"] <= rank["parameters"] * 1.05 + rank["unit"]


def test_what_cannot_work_is_refused_on_every_rank(seen: Any) -> None:
    for rank in each(seen, "checks", "refusals"):
        assert [name for name, what in rank.items() if not what] == []
        assert "without where or fix" not in rank.values()


def test_evaluation_leaves_parameters_sharded_and_training_goes_on(seen: Any) -> None:
    for rank in each(seen, "checks", "evaluation"):
        assert [name for name, holds in rank.items() if not holds] == []


def test_methods_and_whole_weights_are_as_without_sharding(seen: Any) -> None:
    for rank in each(seen, "checks", "methods"):
        assert [name for name, holds in rank.items() if not holds] == []


def test_a_state_is_whole_on_rank_0_and_files_are_small(seen: Any) -> None:
    saving = each(seen, "checks", "saving")
    assert [rank["is whole here"] for rank in saving] == [True] + [False] * (len(saving) - 1)
    for rank in saving:
        assert rank["files"] > 2
        assert rank["largest"] < 2000 + 2000
        assert rank["as saved"]
        assert rank["tied once"]


def test_checkpoints_go_on_with_and_without_sharding(seen: Any) -> None:
    for rank in each(seen, "checks", "saving"):
        assert rank["goes on with fsdp"] == 0
        assert rank["goes on with ddp"] <= 1e-6
        assert rank["ddp to fsdp"] <= 1e-6
        assert rank["state is sharded"]


def test_checkpoints_go_on_with_another_number_of_ranks(seen: Any) -> None:
    _, folder, sum_of_one = seen
    for rank in each(seen, "checks", "saving"):
        assert rank["weights of one rank"] == pytest.approx(sum_of_one, abs=1e-4)
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator, seed=4)
    accelerator.load_state(folder / "sharded")
    saved = torch.nn.utils.parameters_to_vector(model.parameters())
    other = Accelerator(cpu=True)
    again, _ = prepared(other, seed=5)
    other.load_state(folder / "fsdp")
    assert not torch.equal(saved, torch.nn.utils.parameters_to_vector(again.parameters()))
    assert {one["exp_avg"].shape for one in optimizer.state.values()} == {
        one.shape for one in model.parameters()
    }


def test_all_ways_to_train_come_to_the_same_weights(seen: Any) -> None:
    for rank in each(seen, "checks", "ways"):
        for name, difference in rank.items():
            assert difference <= 2e-6, name


def test_an_average_of_weights_is_the_same_with_every_strategy(seen: Any) -> None:
    for with_ddp, with_fsdp in each(seen, "checks", "averages"):
        assert with_fsdp == pytest.approx(with_ddp, abs=1e-5)


def test_a_registered_average_comes_back_in_the_shards_in_which_it_was_given(seen: Any) -> None:
    for rank in each(seen, "checks", "kept averages"):
        assert set(rank.values()) == {True}, rank


def test_several_models_and_frozen_parameters_train_as_ever(seen: Any) -> None:
    for rank in each(seen, "checks", "two models"):
        assert rank == {"frozen stays": True, "unfrozen moves": True}


def test_metrics_are_gathered_once_for_each_sample(seen: Any) -> None:
    for rank in each(seen, "checks", "metrics"):
        assert all(one == list(range(11)) for one in rank.values())


def test_buffers_are_those_of_rank_0(seen: Any) -> None:
    first, *others = each(seen, "checks", "buffers")
    assert others == [first] * len(others)
