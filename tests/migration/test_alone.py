"""Calls that not all ranks make, as `headway adopt` finds them in a script."""

from __future__ import annotations

import ast

import pytest

from headway.migration.alone import calls_alone

SAVE = "    accelerator.save_state('runs')\n"


@pytest.mark.parametrize(
    "condition",
    [
        "accelerator.is_main_process",
        "is_main_process and step % 100 == 0",
        "self.accelerator.is_local_main_process",
        "accelerator.is_main_process or accelerator.distributed_type == DistributedType.DEEPSPEED",
        "accelerator.distributed_type == DistributedType.DEEPSPEED or accelerator.is_main_process",
        "accelerator.process_index == 0",
        "PartialState().local_process_index == 0",
        "not (other or not accelerator.is_main_process)",
        "not accelerator.process_index != 0",
    ],
)
def test_a_save_under_a_condition_that_names_ranks_is_pointed_at(condition: str) -> None:
    assert [*calls_alone(ast.parse(f"if {condition}:\n{SAVE}"))] == [(2, "save_state")]
    negated = f"if not ({condition}):\n    pass\nelse:\n{SAVE}"
    assert [*calls_alone(ast.parse(negated))] == [(4, "save_state")]


@pytest.mark.parametrize(
    "condition",
    [
        "not accelerator.is_main_process",
        "accelerator.process_index != 0",
        "accelerator.process_index > 0",
        "step % 100 == 0",
        "accelerator.is_main_process or is_fsdp",
        "accelerator.distributed_type == DistributedType.DEEPSPEED",
        "not (accelerator.is_main_process and step % 100 == 0)",
    ],
)
def test_a_save_under_another_condition_is_not_pointed_at(condition: str) -> None:
    assert not calls_alone(ast.parse(f"if {condition}:\n{SAVE}"))


@pytest.mark.parametrize(
    "leaving", ["return", "return None", "raise SystemExit", "sys.exit()", "exit(0)"]
)
@pytest.mark.parametrize(
    "condition", ["not self.accelerator.is_main_process", "process_index != 0 or is_over"]
)
def test_a_save_after_the_other_ranks_have_left_is_pointed_at(condition: str, leaving: str) -> None:
    left = f"def save():\n    if {condition}:\n        {leaving}\n"
    assert [*calls_alone(ast.parse(f"{left}    if is_due:\n    {SAVE}"))] == [(5, "save_state")]
    assert not calls_alone(ast.parse(f"{left}def save_all():\n{SAVE}"))


def test_a_save_in_the_rest_of_a_loop_that_other_ranks_leave_out_is_pointed_at() -> None:
    loop = "for batch in loader:\n    if not accelerator.is_main_process:\n        continue\n"
    assert [*calls_alone(ast.parse(f"{loop}{SAVE}"))] == [(4, "save_state")]
    assert not calls_alone(ast.parse(f"{loop}accelerator.save_state('runs')"))


def test_a_call_that_the_other_ranks_make_elsewhere_is_not_pointed_at() -> None:
    wait = "    accelerator.wait_for_everyone()\n"
    main, others = (f"if {one}accelerator.is_main_process:\n" for one in ("", "not "))
    assert not calls_alone(ast.parse(f"{others}{wait}prepare()\n{main}{wait}"))
    assert [*calls_alone(ast.parse(f"{main}{wait}"))] == [(2, "wait_for_everyone")]


@pytest.mark.wording
def test_what_becomes_of_weights_on_one_rank_is_said_to_depend_on_the_strategy() -> None:
    script = "if accelerator.is_main_process:\n    torch.save(accelerator.get_state_dict(model))"
    (call,) = calls_alone(ast.parse(script))
    assert call.method == "get_state_dict"
    assert "fsdp" in call.said
