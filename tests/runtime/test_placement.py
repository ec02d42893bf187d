"""`device` and `devices` in the script: the launcher's grammar, for one process."""

from __future__ import annotations

import pytest

from headway.contract.origin import Layer, Origin
from headway.contract.run import Ranks, RunContract
from headway.errors import MachineError, UsageError
from headway.machine.facts import Machine
from headway.machine.snapshot import load_machine
from headway.training import arguments as placement
from headway.training.arguments import Devices, gpu_named_by, merge_arguments
from tests.machines.recorded import FOLDER


def machine(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    there: Machine = load_machine(str(FOLDER / f"{name}.json"))
    monkeypatch.setattr(placement, "detect_machine", lambda **_: there)


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


PROFILE = Origin(Layer.USER_PROFILE, "~/.config/headway/default.yaml", 2)


def run(device: str, origin: Origin = PROFILE) -> RunContract:
    return RunContract(device, "no", 1, origins={"device": origin})


def test_the_scripts_device_beats_a_profile_aloud_and_may_not_contradict_a_flag() -> None:
    agreed = merge_arguments(run("cuda"), device="cpu")
    assert agreed.run.device == "cpu"
    assert agreed.notes == (f"Accelerator(device='cpu') overrides device='cuda' ({PROFILE})",)
    with pytest.raises(UsageError, match="contradicts device='cuda' from the command line"):
        merge_arguments(run("cuda", Origin(Layer.FLAG, flag="--device")), device="cpu")


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_gpu_is_what_the_launcher_found(device: str) -> None:
    agreed = merge_arguments(run(device), device="gpu")
    assert (agreed.run.device, agreed.notes) == (device, ())
    assert merge_arguments(None, device="gpu").run.device == "gpu"


def test_auto_in_the_script_leaves_it_to_the_launcher() -> None:
    assert (
        merge_arguments(run("cpu", Origin(Layer.FLAG, flag="--device")), device="auto").run.device
        == "cpu"
    )


def test_a_device_that_does_not_exist_and_two_that_contradict_are_refused() -> None:
    with pytest.raises(UsageError, match="'tpu', not one of auto, cpu, cuda, gpu, mps"):
        merge_arguments(None, device="tpu")
    with pytest.raises(UsageError, match="cpu=True and device='mps' contradict"):
        merge_arguments(None, cpu=True, device="mps")
