"""What a launch does on recorded machines, row by row: GPUs, Apple silicon, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from headway.errors import ConfigError, MachineError
from headway.ipc.origin import Layer, Origin
from headway.launcher.plan.build import build_plan
from headway.launcher.plan.program import Program
from headway.machine.facts import GpuUse
from headway.settings.profile import Entry
from headway.settings.resolve import resolve
from tests.launcher.plan.planning import plan as plan_for
from tests.launcher.plan.planning import planned, refusal
from tests.launcher.plan.planning import set_by as variables
from tests.machines.recorded import UUIDS, load

MIG = "MIG-a1b2c3d4-0000-5000-8000-00000000000"
SECOND_UUID = load("gpu_8_h100").gpus[2].uuid


@pytest.mark.parametrize(
    ("machine", "values", "device", "gpus", "mask"),
    [
        ("laptop_cpu", {}, "cpu", (), None),
        ("gpu_1", {"device": "gpu"}, "cuda", (0,), None),
        ("gpu_4", {}, "cuda", (0, 1, 2, 3), None),
        ("gpu_8_h100", {}, "cuda", tuple(range(8)), None),
        ("mask_uuids", {}, "cuda", (0, 1), None),
        ("mask_uuids", {"devices": "1,"}, "cuda", (1,), SECOND_UUID),
        ("gpu_2_one_busy", {"devices": "idle:1"}, "cuda", (1,), "1"),
        ("gpu_exclusive", {}, "cuda", (1,), "1"),
        ("gpu_exclusive", {"devices": "idle:1"}, "cuda", (1,), "1"),
        ("gpu_prohibited", {}, "cuda", (1,), "1"),
        ("gpu_mig", {}, "cuda", (0,), f"{MIG}1"),
        ("gpu_mig", {"devices": "1,"}, "cuda", (1,), f"{MIG}2"),
        ("gpu_mig", {"devices": f"{MIG}2"}, "cuda", (1,), f"{MIG}2"),
        ("gpu_mig_mixed", {}, "cuda", (2, 3), ",".join(UUIDS[1:3])),
        ("gpu_mig_mixed", {"devices": UUIDS[2]}, "cuda", (3,), UUIDS[2]),
        ("gpu_mig_mixed", {"devices": "idle:1"}, "cuda", (2,), UUIDS[1]),
        ("mac_m2", {}, "mps", (), None),
        ("mac_m2", {"device": "gpu"}, "mps", (), None),
        ("mac_m2", {"device": "mps", "devices": "1"}, "mps", (), None),
        ("mac_m2", {"mixed_precision": "bf16"}, "mps", (), None),
        ("mac_m2", {"device": "cpu"}, "cpu", (), None),
    ],
)
def test_the_device_and_its_gpus(
    machine: str, values: dict[str, Any], device: str, gpus: tuple[int, ...], mask: str | None
) -> None:
    plan = planned(machine, **values)
    assert (plan.settings.device, plan.gpus) == (device, gpus)
    assert plan.settings.num_processes == max(1, len(gpus))
    assert variables(plan).get("CUDA_VISIBLE_DEVICES") == mask


@pytest.mark.parametrize(
    ("machine", "values", "reason"),
    [
        ("gpu_8_h100", {"devices": "3"}, "devices 3 = the first 3 GPUs; for GPU 3 write `3,`"),
        ("gpu_2_one_busy", {"devices": "idle:1"}, "skipped GPU 0: used by process 31337"),
        ("gpu_exclusive", {}, "exclusive-process, and process 4242 uses it"),
        ("gpu_prohibited", {}, "compute mode is prohibited"),
        ("gpu_mig_mixed", {}, f"skipped {MIG}2: it is a MIG slice"),
        ("gpu_mig_mixed", {"devices": "idle:1"}, f"devices idle:1 = {UUIDS[1]}"),
        ("mask_minus_one", {}, "4 GPUs not used: CUDA_VISIBLE_DEVICES='-1'"),
        ("mask_minus_one", {}, "unset CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_may_be_unexpected_is_noted(machine: str, values: dict[str, Any], reason: str) -> None:
    assert any(reason in note for note in planned(machine, **values).notes)


def test_a_gpu_of_which_part_of_the_use_is_unknown_is_noted() -> None:
    machine = load("gpu_4")
    gpus = tuple(gpu._replace(use=GpuUse(None, 0, ())) for gpu in machine.gpus)
    notes = plan_for(machine._replace(gpus=gpus), {}, devices="idle:1").notes
    assert "GPU 0 may be in use: its driver reports only part of its usage" in notes


def test_nothing_is_noted_of_what_was_asked_for() -> None:
    for plan in (
        planned("slurm_node", devices="all"),
        planned("gpu_8_h100", devices="0,1"),
        planned("intel_laptop"),  # whose torch has no XPU
        planned("driver_too_old", device="cpu"),
        planned("driver_too_old", {"ACCELERATE_USE_CPU": "1"}),
    ):
        assert plan.notes == ()


def test_several_models_are_counted_as_nvidia_smi_counts_them() -> None:
    plans = planned("gpu_mixed"), planned("gpu_4"), planned("gpu_mixed", {"CUDA_DEVICE_ORDER": ""})
    assert [variables(p).get("CUDA_DEVICE_ORDER") for p in plans] == ["PCI_BUS_ID", None, None]
    assert "RTX 4090" not in refusal("gpu_mixed", devices="1,", mixed_precision="bf16")


def test_a_mask_that_cuda_cuts_short_is_named() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "1,9,2"}
    cut = load("gpu_4")._replace(mask="1,9,2")
    what = "CUDA_VISIBLE_DEVICES=1,9,2 is ignored from 9 on"
    assert any(what in note for note in plan_for(cut, environ).notes)
    with pytest.raises(MachineError, match=what):
        plan_for(cut, environ, devices="2")


REFUSED: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("cpu_torch_on_gpu_box", {}, ("device is 'auto'", "this torch (2.13.0+cpu)", "whl/cu130")),
    ("driver_too_old", {}, ("the NVIDIA driver 535", "update the NVIDIA driver", "--device cpu")),
    ("mask_duplicates", {}, ("duplicates", "torch found none", "unset CUDA_VISIBLE_DEVICES")),
    ("laptop_cpu", {"device": "gpu"}, ("no NVIDIA driver",)),
    (
        "gpu_mixed",
        {"devices": "1,2"},
        ("GPU 2 does not exist", "0 NVIDIA GeForce RTX 4090, 1 Tesla T4"),
    ),
    ("mask_empty", {"device": "cuda"}, ("CUDA_VISIBLE_DEVICES='' hides", "unset CUDA_VISIBLE")),
    ("gpu_2_one_busy", {"devices": "idle:2"}, ("process 31337", "--wait")),
    ("gpu_exclusive", {"devices": "idle:2"}, ("--wait",)),
    ("gpu_exclusive", {"devices": "0,"}, ("process 4242 uses it", "-c DEFAULT")),
    ("gpu_prohibited", {"devices": "0,"}, ("compute mode is prohibited", "-c DEFAULT")),
    ("gpu_prohibited", {"devices": "5,"}, ("name GPUs that exist",)),
    (
        "gpu_prohibited",
        {"num_processes": "2"},
        ("only 1 of 2 GPUs can be used (GPU 0: its compute mode is prohibited)",),
    ),
    ("gpu_mig", {"num_processes": "2"}, ("only one MIG slice",)),
    ("gpu_mig", {"devices": "2"}, ("devices is '2', but CUDA shows each process only one MIG",)),
    ("gpu_mig", {"devices": "idle:1"}, ("its driver does not report its usage",)),
    ("gpu_mig", {"devices": "0,1"}, ("only one MIG slice",)),
    ("gpu_mig_mixed", {"devices": "2-4"}, ("index 2 is ambiguous", f"{UUIDS[1]} NVIDIA H100")),
    ("mac_13", {"device": "gpu"}, ("macOS 13.7.4 is older than 14.0", "update macOS")),
    ("mac_m2", {"num_processes": "2"}, ("MPS supports only one process", "device cpu")),
    ("laptop_cpu", {"device": "mps"}, ("not a Mac", "--device cpu")),
)


@pytest.mark.parametrize(("machine", "values", "parts"), REFUSED)
def test_what_a_machine_cannot_do_is_refused_with_cause_and_fix(
    machine: str, values: dict[str, Any], parts: tuple[str, ...]
) -> None:
    refused = refusal(machine, **values)
    assert all(part in refused for part in parts), refused


@pytest.mark.parametrize(
    ("machine", "devices"),
    [("gpu_8_h100", "idle:9"), ("gpu_prohibited", "idle:2"), ("amd_2", "idle:1")],
)
def test_waiting_is_not_suggested_where_it_cannot_help(machine: str, devices: str) -> None:
    assert "--wait" not in refusal(machine, devices=devices)


@pytest.mark.parametrize("machine", ["cpu_torch_on_gpu_box", "mac_m2", "laptop_cpu"])
@pytest.mark.parametrize("weaker", [Layer.ENVIRONMENT, Layer.USER_PROFILE])
def test_a_device_that_is_asked_for_opts_out_of_the_devices_of_a_weaker_layer(
    machine: str, weaker: Layer
) -> None:
    there = load(machine)
    layers = [
        {"devices": Entry("2", Origin(weaker, flag="--devices"))},
        {"device": Entry("cpu", Origin(Layer.FLAG, flag="--cpu"))},
    ]
    settings = resolve(list(layers), there, {})
    plan = build_plan(settings, there, Program("a.py"), python=["python"], environ={})
    assert plan.notes == ("devices has no effect on cpu, set by flag --cpu (flag --devices)",)
    assert "selects GPUs" in refusal(machine, ConfigError, device="cpu", devices="2")


# ------------------------------------------------------------------ Apple silicon


def test_a_switch_that_means_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="not a boolean"):
        planned("mac_m2", {"ACCELERATE_USE_CPU": "maybe"})


@pytest.mark.parametrize(
    ("machine", "environ", "values", "origin"),
    [
        ("mac_m2", {}, {"device": "cpu"}, "flag --device"),
        ("mac_m2", {}, {"device": "cpu", "layer": Layer.ENVIRONMENT}, "environment --device"),
        ("mac_m2", {"ACCELERATE_USE_CPU": "1"}, {}, "environment ACCELERATE_USE_CPU=1"),
        ("mask_empty", {}, {}, "CUDA_VISIBLE_DEVICES='' hides all GPUs"),
    ],
)
def test_each_way_to_opt_out_of_a_gpu_gives_cpu_and_its_origin(
    machine: str, environ: dict[str, str], values: dict[str, Any], origin: str
) -> None:
    plan = planned(machine, environ, **values)
    assert plan.settings.device == "cpu"
    assert origin in str(plan.settings.origin("device"))


def test_an_outer_launchs_variable_is_no_opt_out_for_an_inner_one() -> None:
    environ = {"HEADWAY_RUN": "{}", "ACCELERATE_USE_CPU": "true"}
    assert planned("mac_m2", environ).settings.device == "mps"
    assert planned("mac_m2", {"ACCELERATE_USE_CPU": "0"}).settings.device == "mps"


@pytest.mark.parametrize(
    ("environ", "values", "value"),
    [
        ({}, {}, "1"),
        ({"PYTORCH_ENABLE_MPS_FALLBACK": "0"}, {}, None),  # it is inherited
        ({}, {"env": {"PYTORCH_ENABLE_MPS_FALLBACK": "0"}}, "0"),
    ],
)
def test_operators_that_mps_lacks_run_on_the_cpu_unless_the_variable_is_set(
    environ: dict[str, str], values: dict[str, Any], value: str | None
) -> None:
    changes = variables(planned("mac_m2", environ, **values))
    assert changes.get("PYTORCH_ENABLE_MPS_FALLBACK") == value
    for plan in (planned("laptop_cpu", environ), planned("mac_m2", environ, device="cpu")):
        assert "PYTORCH_ENABLE_MPS_FALLBACK" not in variables(plan)


def test_devices_select_gpus_and_not_mps() -> None:
    assert "selects GPUs" in refusal("mac_m2", ConfigError, devices="2")
    for devices in ("auto", "-1"):
        assert planned("mac_m2", device="mps", devices=devices).settings.num_processes == 1
