"""Constructor against launcher: who wins, and what is said."""

from __future__ import annotations

import pytest

from headway.contract.origin import Layer, Origin
from headway.contract.run import RunContract
from headway.errors import UsageError
from headway.training.arguments import merge_accumulation, merge_arguments, reject_unsupported

PROFILE = Origin(Layer.USER_PROFILE, "~/.config/headway/default.yaml", 7)
RUN = RunContract(
    device="cuda",
    mixed_precision="fp16",
    gradient_accumulation_steps=4,
    origins={
        "device": Origin(Layer.DETECTED, reason="one GPU"),
        "mixed_precision": PROFILE,
        "gradient_accumulation_steps": Origin(Layer.FLAG, flag="--gradient-accumulation-steps"),
    },
)

KNOWN = ("mixed_precision", "cpu")


def test_without_launcher_and_arguments_the_defaults_hold() -> None:
    agreed = merge_arguments(None)
    assert agreed.run[:3] == ("auto", "no", 1)
    assert agreed.notes == ()


def test_launcher_s_settings_hold_where_the_script_says_nothing() -> None:
    agreed = merge_arguments(RUN)
    assert agreed.run[:3] == ("cuda", "fp16", 4)
    assert agreed.where("mixed_precision") == str(PROFILE)
    assert agreed.notes == ()


def test_argument_beats_profile_and_says_so_in_one_line() -> None:
    agreed = merge_arguments(RUN, mixed_precision="bf16")
    assert agreed.run.mixed_precision == "bf16"
    assert agreed.notes == (
        f"Accelerator(mixed_precision='bf16') overrides mixed_precision='fp16' ({PROFILE})",
    )


def test_argument_no_beats_profile_too() -> None:
    assert merge_arguments(RUN, mixed_precision="no").run.mixed_precision == "no"


def test_cpu_beats_a_detected_device_without_a_line() -> None:
    agreed = merge_arguments(RUN, cpu=True)
    assert agreed.run.device == "cpu"
    assert agreed.notes == ()


def test_argument_that_contradicts_a_flag_is_refused_naming_both() -> None:
    with pytest.raises(UsageError) as refused:
        merge_arguments(RUN, gradient_accumulation_steps=2)
    assert "gradient_accumulation_steps=2" in str(refused.value)
    assert "--gradient-accumulation-steps" in str(refused.value)


def test_cpu_that_contradicts_a_flag_is_refused() -> None:
    typed = RUN._replace(origins={"device": Origin(Layer.FLAG, flag="--device")})
    with pytest.raises(UsageError, match=r"cpu=True.*contradicts device='cuda'"):
        merge_arguments(typed, cpu=True)


def test_argument_that_repeats_a_flag_is_fine() -> None:
    assert merge_arguments(RUN, gradient_accumulation_steps=4).notes == ()


@pytest.mark.parametrize("precision", ["fp8", "float16", ""])
def test_unknown_precision_is_refused(precision: str) -> None:
    with pytest.raises(UsageError, match="not one of no, fp16, bf16"):
        merge_arguments(None, mixed_precision=precision)


@pytest.mark.parametrize(("name", "meant"), [("fp32", "no"), ("float16", "fp16"), ("fp8", "bf16")])
def test_the_name_that_was_meant_is_the_fix(name: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"pass mixed_precision='{meant}'"):
        merge_arguments(None, mixed_precision=name)


@pytest.mark.parametrize("steps", [0, -1, True, 1.5])
def test_impossible_accumulation_is_refused(steps: int) -> None:
    with pytest.raises(UsageError, match="gradient_accumulation_steps is"):
        merge_accumulation(steps, None)


def test_accelerate_s_other_arguments_are_refused_with_a_way_out() -> None:
    with pytest.raises(UsageError, match=r"'even_batches'[\s\S]*DataLoaderConfiguration"):
        reject_unsupported({"even_batches": False}, KNOWN)
    with pytest.raises(UsageError, match=r"'logging_dir'[\s\S]*project_dir="):
        reject_unsupported({"logging_dir": "runs"}, KNOWN)


def test_accelerate_s_other_arguments_may_be_none() -> None:
    reject_unsupported({"fsdp_plugin": None, "megatron_lm_plugin": None}, KNOWN)


def test_a_mistyped_argument_is_refused_with_a_guess() -> None:
    with pytest.raises(UsageError, match="did you mean mixed_precision="):
        reject_unsupported({"mixed_precison": None}, KNOWN)
