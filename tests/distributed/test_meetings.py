"""Calls of which all ranks take part, made by some only: no rank waits for ever."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.checkpoint.manifest import read_manifest
from tests.distributed.launching import launch, script
from tests.distributed.ranks import Seen

pytest.importorskip("torch")
pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("seen_with")]
several_ranks = pytest.mark.parametrize("world", [2, 3])


@several_ranks
def test_a_call_on_one_rank_alone_names_both_places_and_the_ranks_can_go_on(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    first, *others = (rank["calls_on_rank_0_alone"] for rank in seen_with(world))
    for name, (beside_torch, beside_another) in first.items():
        for told in (beside_torch, beside_another):
            assert len({*re.findall(r"meeting_checks\.py:\d+", told)}) == 2, (name, told)
    for other in others:
        for name, (_, beside_another) in other.items():
            assert len({*re.findall(r"meeting_checks\.py:\d+", beside_another)}) == 2, name


@several_ranks
@pytest.mark.parametrize("package", ["headway.accelerator", "headway.compat.accelerator"])
def test_save_state_on_rank_0_alone_saves_what_all_share_and_all_ranks_load_it(
    seen_with: Callable[[int], Seen], world: int, package: str
) -> None:
    for rank in seen_with(world):
        seen = rank["save_state_on_some_ranks"][package]
        assert seen["loaded"] == seen["saved"]
        assert seen["weights"] == ["model.safetensors"]
        assert len({str(one) for one in seen["after"]}) == 1
        some = 2 if world == 2 else 1  # ranks 0 and the last are all of two
        assert seen["parts"] == {"": 1, "_later": 1, "_some": some, "_all": world}
        assert seen["worlds"]


@several_ranks
@pytest.mark.parametrize("package", ["headway.accelerator", "headway.compat.accelerator"])
def test_rank_0_says_once_that_it_saves_alone_and_where_and_so_when_all_load_it(
    seen_with: Callable[[int], Seen], world: int, package: str
) -> None:
    first, *others = (one["save_state_on_some_ranks"][package] for one in seen_with(world))
    saving, loading = first["notes"]
    assert len(re.findall(r"meeting_checks\.py:\d+", saving)) == saving.count("\n") == 1
    assert f"by_rank_0_{world}_{package}" in loading
    assert loading.count("\n") == 1
    assert {tuple(other["notes"]) for other in others} == {("", "")}


@several_ranks
def test_all_ranks_go_on_at_the_next_sample_of_a_checkpoint_that_rank_0_saved_alone(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    for rank in seen_with(world):
        seen = rank["samples_after_a_save_of_rank_0"]
        assert seen["loaded"] == seen["went on"] != []


@several_ranks
def test_hooks_of_checkpoints_get_the_models_as_they_were_before_prepare(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    for rank in seen_with(world):
        for seen in rank["save_state_on_some_ranks"].values():
            assert len(seen["hooked"]) >= 2  # as in Accelerate, where DDP wraps them later
            assert {name for (name,) in seen["hooked"]} == {"Linear"}


@several_ranks
def test_save_state_without_rank_0_is_refused(seen_with: Callable[[int], Seen], world: int) -> None:
    for seen in seen_with(world)[-1]["save_state_on_some_ranks"].values():
        assert len({*re.findall(r"meeting_checks\.py:\d+", seen["refused"])}) == 2


def test_save_state_without_rank_0_is_refused_though_rank_0_has_saved_alone_before(
    seen_with: Callable[[int], Seen],
) -> None:
    told = seen_with(3)[2]["a_save_after_one_of_rank_0"]
    assert len({*re.findall(r"meeting_checks\.py:\d+", told)}) == 2, told


def test_ranks_0_and_2_of_3_save_in_a_loop_whichever_is_late(
    seen_with: Callable[[int], Seen],
) -> None:
    for rank in seen_with(3):
        for case, seen in rank["saves_of_ranks_0_and_2_of_3"].items():
            assert seen == ["no error", 1], case


@several_ranks
def test_a_training_that_ends_by_an_error_waits_for_no_other_rank(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    assert all(rank["an_end_after_an_error"] for rank in seen_with(world))


@several_ranks
def test_a_rank_that_is_only_slow_is_waited_for(
    seen_with: Callable[[int], Seen], world: int
) -> None:
    assert all(rank["a_slow_rank"] for rank in seen_with(world))


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
