"""Constructor against launcher: who wins, and what is said."""

from __future__ import annotations

from typing import Any

import pytest

from headway.contract.origin import Layer, Origin
from headway.contract.run import Ranks, RunContract
from headway.errors import MachineError, UsageError
from headway.machine.facts import Machine
from headway.machine.snapshot import load_machine
from headway.training import arguments
from headway.training.arguments import (
    Devices,
    gpu_named_by,
    merge_accumulation,
    merge_arguments,
    reject_unsupported,
)
from tests.machines.recorded import FOLDER

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


FLAG = Origin(Layer.FLAG, flag="--device")


def run(device: str, origin: Origin = PROFILE) -> RunContract:
    return RunContract(device, "no", 1, origins={"device": origin})


@pytest.mark.parametrize(
    ("launcher", "given", "setting", "value", "overridden"),
    [
        (RUN, {"mixed_precision": "bf16"}, "mixed_precision", "bf16", "'fp16'"),
        (RUN, {"mixed_precision": "no"}, "mixed_precision", "no", "'fp16'"),
        (RUN, {"cpu": True}, "device", "cpu", None),  # in place of a detected one
        (RUN, {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps", 4, None),  # equal
        (run("cuda"), {"device": "cpu"}, "device", "cpu", "'cuda'"),
        (run("cuda"), {"device": "gpu"}, "device", "cuda", None),
        (run("mps"), {"device": "gpu"}, "device", "mps", None),
        (None, {"device": "gpu"}, "device", "gpu", None),
        (run("cpu", FLAG), {"device": "auto"}, "device", "cpu", None),
    ],
)
def test_an_argument_beats_a_profile_and_says_so_in_one_line(
    launcher: RunContract | None,
    given: dict[str, Any],
    setting: str,
    value: object,
    overridden: str | None,
) -> None:
    agreed = merge_arguments(launcher, **given)
    assert getattr(agreed.run, setting) == value
    note = f"Accelerator({setting}={value!r}) overrides {setting}={overridden} ({PROFILE})"
    assert agreed.notes == (() if overridden is None else (note,))


@pytest.mark.parametrize(
    ("launcher", "given", "said"),
    [
        (
            *(RUN, {"gradient_accumulation_steps": 2}),
            r"gradient_accumulation_steps=2[\s\S]*--gradient-accumulation-steps",
        ),
        (run("cuda", FLAG), {"cpu": True}, r"cpu=True.*contradicts device='cuda'"),
        (run("cuda", FLAG), {"device": "cpu"}, "contradicts device='cuda' from the command line"),
        (None, {"device": "tpu"}, "'tpu', not one of auto, cpu, cuda, gpu, mps"),
        (None, {"cpu": True, "device": "mps"}, "cpu=True and device='mps' contradict"),
    ],
)
def test_what_contradicts_a_flag_or_cannot_be_is_refused(
    launcher: RunContract | None, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        merge_arguments(launcher, **given)


@pytest.mark.parametrize(
    ("name", "meant"), [("fp32", "no"), ("float16", "fp16"), ("fp8", "bf16"), ("", "bf16")]
)
def test_an_unknown_precision_is_refused_with_the_one_that_was_meant(name: str, meant: str) -> None:
    said = rf"not one of no, fp16, bf16[\s\S]*pass mixed_precision='{meant}'"
    with pytest.raises(UsageError, match=said):
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


def machine(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    there: Machine = load_machine(str(FOLDER / f"{name}.json"))
    monkeypatch.setattr(arguments, "detect_machine", lambda **_: there)


@pytest.mark.parametrize(
    ("devices", "index"),
    [([3], 3), ("3,", 3), (["2"], 2), (1, 0), ("1", 0), (-1, None), ("all", None), ("auto", None)],
)
def test_one_process_takes_the_gpu_that_is_named(
    devices: Devices, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, "gpu_8_h100")
    assert gpu_named_by(devices, "auto", None) == index


def test_one_process_finds_an_idle_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "gpu_2_one_busy")
    assert gpu_named_by("idle:1", "gpu", None) == 1


@pytest.mark.parametrize(
    ("devices", "device", "reason", "fix"),
    [
        (3, "auto", "the first 3 GPUs", "headway launch --devices 3"),
        ([1, 3], "cuda", "GPU 1, 3", "headway launch --devices 1,3"),
        ("^0", "gpu", "all GPUs except 0", "headway launch --devices ^0"),
        ([1], "cpu", "selects GPUs, but device is 'cpu'", "headway launch --cpu"),
        (True, "auto", "is not a count", "pass a count"),
        (1.0, "auto", "is not a count", "pass a count"),
        ("gpu:0", "auto", "is not a count", "pass a count"),
        ([1, 1], "auto", "lists a GPU twice", "pass a count"),
    ],
)
def test_what_one_process_cannot_do_is_refused_with_the_way_out(
    devices: Devices, device: str, reason: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, "gpu_8_h100")
    with pytest.raises(UsageError) as caught:
        gpu_named_by(devices, device, None)
    assert reason in str(caught.value)
    assert fix in caught.value.problems[0].fix


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "gpu_4")
    with pytest.raises(MachineError, match="GPU 4 does not exist"):
        gpu_named_by([4], "auto", None)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_one_device_is_no_choice_on_a_cpu_or_a_mac(device: str) -> None:
    assert gpu_named_by(1, device, None) is None


def test_under_a_launcher_the_script_must_agree_with_what_was_started() -> None:
    ranks = Ranks(rank=0, local_rank=0, world_size=4, local_world_size=4)
    assert gpu_named_by(4, "cuda", ranks) is None
    with pytest.raises(UsageError, match="the launcher started 4 process"):
        gpu_named_by(2, "cuda", ranks)
