"""Constructor against launcher: who wins, and what is said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import headway
from headway import utils
from headway.errors import UsageError
from headway.ipc.origin import Layer, Origin
from headway.ipc.run_contract import RunContract
from headway.state import AcceleratorState
from headway.tracking import JsonlTracker
from headway.training.arguments import merge_arguments, reject_unsupported

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
    run, notes = merge_arguments(None)
    assert run[:3] == ("auto", "no", 1)
    assert notes == []


def test_launcher_s_settings_hold_where_the_script_says_nothing() -> None:
    run, notes = merge_arguments(RUN)
    assert run[:3] == ("cuda", "fp16", 4)
    assert run.origins["mixed_precision"] == PROFILE
    assert notes == []


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
    agreed, notes = merge_arguments(launcher, **given)
    assert getattr(agreed, setting) == value
    note = f"Accelerator({setting}={value!r}) overrides {setting}={overridden} ({PROFILE})"
    assert notes == ([] if overridden is None else [note])


@pytest.mark.parametrize(
    ("launcher", "given", "said"),
    [
        (
            *(RUN, {"gradient_accumulation_steps": 2}),
            r"gradient_accumulation_steps=2[\s\S]*--gradient-accumulation-steps",
        ),
        (run("cuda", FLAG), {"cpu": True}, r"cpu=True.*contradicts device='cuda'"),
        (run("cuda", FLAG), {"device": "cpu"}, "contradicts device='cuda' from the command line"),
        (None, {"device": "tpu"}, "'tpu' for device: must be one of auto, cpu, cuda, gpu, mps"),
        (None, {"cpu": True, "device": "mps"}, "both cpu=True and device='mps'"),
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
    said = rf"must be one of no, fp16, bf16[\s\S]*pass mixed_precision='{meant}'"
    with pytest.raises(UsageError, match=said):
        merge_arguments(None, mixed_precision=name)


def test_accelerate_s_other_arguments_are_refused_with_a_way_out() -> None:
    with pytest.raises(UsageError, match=r"'devices'[\s\S]*headway launch --devices"):
        reject_unsupported({"devices": [1]}, KNOWN)


def test_accelerate_s_other_arguments_may_be_none() -> None:
    reject_unsupported({"fsdp_plugin": None, "megatron_lm_plugin": None}, KNOWN)


WRONG = Path(__file__).with_name("wrong.txt").read_text().splitlines()


@pytest.mark.parametrize("code", WRONG)
def test_a_wrong_argument_is_named_with_its_value_and_what_is_accepted(code: str) -> None:
    names = {name: getattr(module, name) for module in (utils, headway) for name in module.__all__}
    names |= {"AcceleratorState": AcceleratorState, "torch": torch, "model": torch.nn.Linear(1, 1)}
    names |= {
        "JsonlTracker": JsonlTracker,
        "accelerator": headway.Accelerator(cpu=True),
        "one": torch.ones(1).requires_grad_(),
    }
    with pytest.raises(UsageError) as refused:
        exec(code, names)  # noqa: S102
    argument = re.findall(r"\w+(?==)", code) or [r"\w+"]
    wrong = rf"({argument[-1]} is .+, (not|and)|invalid value .+ for {argument[-1]}:) "
    said = rf"{wrong}.+\n  from: .+\n  fix:  pass "
    assert re.match(said, str(refused.value))
