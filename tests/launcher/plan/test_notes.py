"""After a success, a setting that nothing used is named; where something may have, nothing is."""

from __future__ import annotations

from typing import Any

import pytest

from headway.ipc.records import FeatureUse
from headway.launcher.plan.notes import final_notes, unused
from tests.launcher.plan.planning import plan
from tests.launcher.plan.planning import settings_of as settings

NOTHING = FeatureUse(accelerator=False, group=False)
GROUP = FeatureUse(accelerator=False, group=True)
ACCELERATOR = FeatureUse(accelerator=True, group=True)


def test_one_machine_that_may_be_the_only_one_is_not_told_about_groups() -> None:
    elastic: dict[str, Any] = {"num_machines": "1:2", "main_address": "a", "num_processes": "1"}
    assert unused(settings(**elastic), [GROUP._replace(group=False)]) == []
    (note,) = unused(
        settings(**elastic | {"num_processes": "2"}), [GROUP._replace(group=False)] * 2
    )
    assert "process group" in note


def test_a_precision_without_an_accelerator_is_named_with_its_origin() -> None:
    (note,) = unused(settings(num_processes="2", mixed_precision="bf16"), [GROUP, GROUP])
    assert "mixed_precision bf16 was not used" in note
    assert "--mixed-precision" in note


def test_ranks_without_a_group_are_named_in_the_same_note() -> None:
    asked = settings(num_processes="2", mixed_precision="bf16", gradient_accumulation_steps="4")
    (note,) = unused(asked, [NOTHING, NOTHING])
    assert "mixed_precision bf16 and gradient_accumulation_steps 4 were not used" in note
    assert "each of the 2 ranks ran the whole script; " in note
    (note,) = unused(asked, [NOTHING, NOTHING], mentions_rank=True)
    assert "each of the 2 ranks ran the whole script, unless the script reads RANK; " in note


@pytest.mark.parametrize(
    "ranks",
    [
        [ACCELERATOR, ACCELERATOR],
        [NOTHING, ACCELERATOR],  # one rank is enough
        [NOTHING, None],  # os._exit: it is not known what it did
        [GROUP, GROUP._replace(readers=("accelerate",))],
    ],
)
def test_nothing_is_said_where_something_used_the_settings(ranks: list[FeatureUse | None]) -> None:
    assert unused(settings(num_processes="2", mixed_precision="bf16"), ranks) == []


@pytest.mark.parametrize("library", [(), ("transformers.trainer",)])
def test_sharding_that_no_accelerator_obeys_is_named_whatever_else_trains(
    library: tuple[str, ...],
) -> None:
    rank = GROUP._replace(readers=library)
    asked = settings(
        num_processes="2", strategy="fsdp", activation_checkpointing="yes", wrap="Block"
    )
    (note,) = unused(asked, [rank, rank])
    assert "strategy fsdp, wrap Block and activation_checkpointing yes were not used" in note
    (note,) = unused(settings(activation_checkpointing="yes", strategy="fsdp"), [rank])
    assert "activation_checkpointing yes was not used" in note  # on one rank nothing is sharded
    assert unused(asked, [ACCELERATOR._replace(readers=library)] * 2) == []


def test_ranks_without_a_group_are_named_whatever_library_is_imported() -> None:
    fixes = {"accelerate": "headway.Accelerator", "lightning_fabric": "devices=2, num_nodes=1"}
    for library, fix in fixes.items():
        (note,) = unused(settings(num_processes="2"), [NOTHING._replace(readers=(library,))] * 2)
        assert "no rank joined a process group" in note
        assert fix in note


def test_a_library_does_not_resume_by_headways_settings() -> None:
    rank = GROUP._replace(readers=("lightning",))
    (note,) = unused(settings(resume="latest"), [rank])
    assert "resume was not used" in note


def test_nothing_is_said_of_settings_that_nobody_set() -> None:
    assert unused(settings(num_processes="2"), [GROUP, GROUP]) == []
    assert unused(settings(), [NOTHING]) == []
    logged = ACCELERATOR._replace(notes=("a model was not passed to prepare()",))
    assert final_notes(plan(), [None, logged]) == [*logged.notes]  # again, at the end


def test_a_checkpoint_and_a_time_limit_that_the_script_does_not_look_at_are_named() -> None:
    asked = settings(resume="latest", time_limit="1h")
    (note,) = unused(asked, [ACCELERATOR])
    assert "resume was not used" in note
    assert "time_limit was not used" in note
    (note,) = unused(asked, [ACCELERATOR._replace(resuming=True)])
    assert note.startswith("time_limit was not used")
    assert unused(asked, [ACCELERATOR._replace(resuming=True, stopping=True)]) == []
