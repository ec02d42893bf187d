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
TYPED = RUN._replace(origins={"device": Origin(Layer.FLAG, flag="--device")})
PROFILED = RUN._replace(origins={"device": PROFILE})


@pytest.mark.parametrize(
    ("run", "given", "expected", "overridden"),
    [
        (None, {}, ("auto", "no", 1), ""),
        (None, {"device": "gpu"}, ("gpu", "no", 1), ""),
        (RUN, {}, ("cuda", "fp16", 4), ""),
        (RUN, {"mixed_precision": "bf16"}, ("cuda", "bf16", 4), "mixed_precision='fp16'"),
        (RUN, {"mixed_precision": "no"}, ("cuda", "no", 4), "mixed_precision='fp16'"),
        (RUN, {"cpu": True}, ("cpu", "fp16", 4), ""),  # the device was detected, not set
        (RUN, {"gradient_accumulation_steps": 4}, ("cuda", "fp16", 4), ""),
        (PROFILED, {"device": "cpu"}, ("cpu", "fp16", 4), "device='cuda'"),
        (TYPED, {"device": "auto"}, ("cuda", "fp16", 4), ""),
        (TYPED, {"device": "gpu"}, ("cuda", "fp16", 4), ""),
        (TYPED._replace(device="mps"), {"device": "gpu"}, ("mps", "fp16", 4), ""),
    ],
)
def test_the_script_s_arguments_override_a_profile_in_one_line(
    run: RunContract | None, given: dict[str, Any], expected: tuple[object, ...], overridden: str
) -> None:
    agreed = merge_arguments(run, **given)
    assert agreed.run[:3] == expected
    written = ", ".join(f"{name}={value!r}" for name, value in given.items())
    line = f"Accelerator({written}) overrides {overridden} ({PROFILE})"
    assert agreed.notes == ((line,) if overridden else ())


def test_a_setting_s_origin_is_known() -> None:
    assert merge_arguments(RUN).where("mixed_precision") == str(PROFILE)
    assert merge_arguments(RUN, mixed_precision="no").where("mixed_precision") == arguments.CALL


@pytest.mark.parametrize(
    ("run", "given", "said"),
    [
        (RUN, {"gradient_accumulation_steps": 2}, r"steps=2[\s\S]*--gradient-accumulation-steps"),
        (TYPED, {"cpu": True}, "cpu=True.*contradicts device='cuda' from the command line"),
        (TYPED, {"device": "cpu"}, "contradicts device='cuda' from the command line"),
        (None, {"device": "tpu"}, "'tpu', not one of auto, cpu, cuda, gpu, mps"),
        (None, {"cpu": True, "device": "mps"}, "cpu=True and device='mps' contradict"),
        *(
            (None, {"mixed_precision": name}, rf"no, fp16, bf16[\s\S]*mixed_precision='{meant}'")
            for name, meant in {"fp32": "no", "float16": "fp16", "fp8": "bf16", "": "bf16"}.items()
        ),
    ],
)
def test_arguments_that_contradict_a_flag_or_are_impossible_are_refused(
    run: RunContract | None, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        merge_arguments(run, **given)


@pytest.mark.parametrize("steps", [0, -1, True, 1.5])
def test_impossible_accumulation_is_refused(steps: int) -> None:
    with pytest.raises(UsageError, match="gradient_accumulation_steps is"):
        merge_accumulation(steps, None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"even_batches": False}, r"'even_batches'[\s\S]*DataLoaderConfiguration"),
        ({"logging_dir": "runs"}, r"'logging_dir'[\s\S]*project_dir="),
        ({"mixed_precison": None}, "did you mean mixed_precision="),
    ],
)
def test_other_arguments_are_refused_with_a_way_out(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        reject_unsupported(given, KNOWN)


def test_accelerate_s_other_arguments_may_be_none() -> None:
    reject_unsupported({"fsdp_plugin": None, "megatron_lm_plugin": None}, KNOWN)


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
