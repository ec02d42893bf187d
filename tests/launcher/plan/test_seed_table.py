"""What the documents of Ludwig, Transformers, Lightning and Accelerate promise about devices, MPS,
flags and variables, row by row; where those tools are wrong, what is right."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.contract.origin import Layer, Origin
from headway.contract.records import Crash
from headway.errors import ConfigError, MachineError
from headway.launcher.diagnosis.failures import RankExit, find_failure
from headway.launcher.plan.describe import describe
from headway.launcher.plan.plan import build_plan
from headway.launcher.plan.program import Program
from headway.machine.detection import detect_machine
from headway.machine.snapshot import load_machine
from headway.settings.profile import Entry
from headway.settings.resolve import resolve
from tests.commands.running import python
from tests.launcher.plan.planning import plan as plan_for
from tests.launcher.plan.planning import planned, refusal
from tests.launcher.plan.planning import set_by as variables
from tests.machines.recorded import FOLDER, Recorded, Recording, mac

# ------------------------------------------------------------------ GPUs (Ludwig, Lightning)


@pytest.mark.parametrize(("machine", "gpus"), [("gpu_1", 1), ("gpu_4", 4), ("gpu_8_h100", 8)])
def test_gpus_are_used_without_any_flag(machine: str, gpus: int) -> None:
    plan = planned(machine)
    assert (plan.settings.device, plan.gpus) == ("cuda", tuple(range(gpus)))
    assert plan.settings.num_processes == gpus
    assert "CUDA_VISIBLE_DEVICES" not in variables(plan)
    assert planned("laptop_cpu").settings.device == "cpu"


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ("mask_empty", "CUDA_VISIBLE_DEVICES='' hides all GPUs"),
        ("mask_minus_one", "CUDA_VISIBLE_DEVICES='-1' hides all GPUs"),
        ("mask_duplicates", "lists one twice"),
    ],
)
def test_an_empty_mask_disables_gpus_and_is_the_origin(machine: str, reason: str) -> None:
    plan = planned(machine)
    assert plan.settings.device == "cpu"
    assert reason in plan.settings.origin("device").brief
    refused = refusal(machine, device="cuda")
    assert "device is 'cuda'" in refused
    assert reason in refused
    assert "unset CUDA_VISIBLE_DEVICES" in refused


def test_a_mask_of_uuids_is_counted_through() -> None:
    assert planned("mask_uuids").gpus == (0, 1)
    uuids = [gpu.uuid for gpu in load_machine(str(FOLDER / "gpu_8_h100.json")).gpus]
    assert variables(planned("mask_uuids", devices="1,"))["CUDA_VISIBLE_DEVICES"] == uuids[2]


def test_a_count_says_that_it_is_no_index() -> None:
    plan = planned("gpu_8_h100", devices="3")
    assert "devices 3 = the first 3 GPUs; for GPU 3 write `3,`" in plan.notes
    assert "the first 3 GPUs; for GPU 3 write `3,`" in describe(plan)


def test_a_gpu_that_does_not_exist_is_refused_with_a_list_of_those_that_do() -> None:
    refused = refusal("gpu_mixed", devices="1,2")
    assert "GPU 2 does not exist" in refused
    assert "0 NVIDIA GeForce RTX 4090, 1 Tesla T4" in refused


def test_gpu_is_cuda_or_mps_or_an_error() -> None:
    assert planned("gpu_1", device="gpu").settings.device == "cuda"
    assert planned("mac_m2", device="gpu").settings.device == "mps"
    assert "no NVIDIA driver" in refusal("laptop_cpu", device="gpu")


def test_explicit_indices_under_a_scheduler_give_a_warning() -> None:
    (warning,) = planned("slurm_node", devices="0,1").notes
    assert "SLURM (SLURM_JOB_ID=4711) assigns the GPUs" in warning
    assert "--devices 2" in warning
    assert "--devices 3" in planned("slurm_node", devices="^0").notes[0]
    assert not planned("slurm_node", devices="all").notes
    assert not planned("gpu_8_h100", devices="0,1").notes


@pytest.mark.wording
def test_gpus_that_nobody_uses_are_found_and_the_others_named_with_the_reason() -> None:
    plan = planned("gpu_2_one_busy", devices="idle:1")
    assert variables(plan)["CUDA_VISIBLE_DEVICES"] == "1"
    assert "skipped GPU 0: used by process 31337" in plan.notes
    assert "process 31337" in refusal("gpu_2_one_busy", devices="idle:2")


def test_exclusive_gpus_in_use_and_prohibited_ones_are_passed_over() -> None:
    for machine, reason in (
        ("gpu_exclusive", "exclusive-process, and process 4242 uses it"),
        ("gpu_prohibited", "compute mode is prohibited"),
    ):
        plan = planned(machine)
        assert variables(plan)["CUDA_VISIBLE_DEVICES"] == "1"
        assert any(reason in note for note in plan.notes)
        assert planned(machine, devices="idle:1").gpus == (1,)
        assert reason in refusal(machine, devices="0,")


def test_mig_slices_are_named_by_their_ids_one_for_a_launch() -> None:
    plan = planned("gpu_mig")
    assert plan.settings.num_processes == 1
    first, second = (f"MIG-a1b2c3d4-0000-5000-8000-00000000000{n}" for n in (1, 2))
    assert variables(plan)["CUDA_VISIBLE_DEVICES"] == first
    for devices in ("1,", second, "MIG-a1b2c3d4-0000-5000-8000-000000000002,"):
        assert variables(planned("gpu_mig", devices=devices))["CUDA_VISIBLE_DEVICES"] == second
    assert "only one MIG slice" in refusal("gpu_mig", num_processes="2")


def test_several_models_are_counted_as_nvidia_smi_counts_them() -> None:
    assert variables(planned("gpu_mixed"))["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "CUDA_DEVICE_ORDER" not in variables(planned("gpu_4"))
    assert "RTX 4090" not in refusal("gpu_mixed", devices="1,", mixed_precision="bf16")


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ("cpu_torch_on_gpu_box", "this torch (2.13.0+cpu) is built without CUDA"),
        ("driver_too_old", "needs driver 580.65 or newer"),
    ],
)
def test_a_torch_that_does_not_fit_the_gpus_is_named(machine: str, reason: str) -> None:
    assert reason in refusal(machine, device="cuda")
    assert reason in planned(machine).settings.origin("device").brief


@pytest.mark.wording
@pytest.mark.parametrize(
    ("machine", "reason", "fix"),
    [
        ("cpu_torch_on_gpu_box", "2 GPUs not used: this torch (2.13.0+cpu)", "whl/cu130"),
        ("driver_too_old", "2 GPUs not used: the NVIDIA driver 535", "update the NVIDIA driver"),
        (
            "mask_minus_one",
            "4 GPUs not used: CUDA_VISIBLE_DEVICES='-1'",
            "unset CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_gpus_that_are_not_used_get_a_note_unless_the_cpu_was_asked_for(
    machine: str, reason: str, fix: str
) -> None:
    (note,) = planned(machine).notes
    assert reason in note
    assert fix in note.partition("fix: ")[2]
    assert planned(machine, device="cpu").notes == ()
    assert planned(machine, {"ACCELERATE_USE_CPU": "1"}).notes == ()
    assert fix in refusal(machine, device="cuda").partition("fix:")[2]


def test_a_mask_that_cuda_cuts_short_is_named() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "1,9,2"}
    cut = load_machine(str(FOLDER / "gpu_4.json"))._replace(cuda_visible_devices="1,9,2")
    what = "CUDA_VISIBLE_DEVICES=1,9,2 lists a GPU that does not exist"
    assert any(what in note for note in plan_for(cut, environ).notes)
    with pytest.raises(MachineError, match=what):
        plan_for(cut, environ, devices="2")


@pytest.mark.parametrize("devices", ["2", "idle:2", "0,1"])
def test_several_mig_slices_are_refused_however_they_are_asked_for(devices: str) -> None:
    refused = refusal("gpu_mig", devices=devices)
    assert f"devices is '{devices}', but CUDA shows each process only one MIG slice" in refused


@pytest.mark.wording
@pytest.mark.parametrize("machine", ["cpu_torch_on_gpu_box", "mac_m2", "laptop_cpu"])
@pytest.mark.parametrize(
    ("stronger", "weaker"), [(Layer.FLAG, Layer.ENVIRONMENT), (Layer.FLAG, Layer.USER_PROFILE)]
)
def test_a_device_that_is_asked_for_opts_out_of_the_devices_of_a_weaker_layer(
    machine: str, stronger: Layer, weaker: Layer
) -> None:
    there = load_machine(str(FOLDER / f"{machine}.json"))
    layers = [
        {"devices": Entry("2", Origin(weaker, flag="--devices"))},
        {"device": Entry("cpu", Origin(stronger, flag="--cpu"))},
    ]
    settings = resolve(list(layers), there, {})
    plan = build_plan(settings, there, Program("a.py"), python=["python"], environ={})
    assert plan.notes == ("devices has no effect on cpu, set by flag --cpu (flag --devices)",)
    assert "which selects GPUs" in refusal(machine, ConfigError, device="cpu", devices="2")


def test_devices_where_there_is_no_cuda_are_not_answered_with_a_device_that_is_refused() -> None:
    refused = refusal("laptop_cpu", ConfigError, devices="2")
    assert "device: cuda" not in refused
    assert "leave --devices out" in refused


@pytest.mark.wording
def test_gpus_that_cannot_be_used_are_the_reason_for_too_few() -> None:
    refused = refusal("gpu_prohibited", num_processes="2")
    assert "only 1 of 2 GPUs can be used (GPU 0: its compute mode is prohibited)" in refused
    assert "devices ^1, selects 3 of 4 GPUs" in refusal("gpu_4", devices="^1", num_processes="4")


def test_leaving_all_gpus_out_is_refused_with_that_as_the_reason() -> None:
    assert "no GPU can be used: devices is ^0,^1,^2" in refusal("gpu_4", devices="^0-3")


@pytest.mark.parametrize("machine", ["gpu_prohibited", "gpu_exclusive"])
def test_a_named_gpu_that_nobody_may_use_gets_a_fix_that_helps(machine: str) -> None:
    uuid = load_machine(str(FOLDER / f"{machine}.json")).gpus[0].uuid
    assert f"nvidia-smi -i {uuid} -c DEFAULT" in refusal(machine, devices="0,")
    assert "name GPUs that exist" in refusal(machine, devices="5,")


def test_gpu_on_a_mac_without_mps_says_why() -> None:
    refused = refusal("mac_12_2", device="gpu")
    assert "macOS 12.2 is older than 12.3" in refused
    assert "update macOS" in refused


@pytest.mark.parametrize(
    ("machine", "devices", "waits"),
    [
        ("gpu_2_one_busy", "idle:2", True),
        ("gpu_8_h100", "idle:9", False),
        ("gpu_prohibited", "idle:2", False),
        ("gpu_exclusive", "idle:2", True),
        ("amd_2", "idle:1", False),
    ],
)
def test_waiting_is_suggested_only_where_it_can_help(
    machine: str, devices: str, waits: bool
) -> None:
    assert ("--wait" in refusal(machine, devices=devices)) == waits


def test_more_gpus_than_there_are_is_refused_with_both_facts() -> None:
    refused = refusal("laptop_cpu", layer=Layer.USER_PROFILE, device="cuda", num_processes="8")
    assert "device is 'cuda' for 8 processes" in refused
    assert "no NVIDIA driver" in refused
    assert "num_processes is 8" in refusal("gpu_4", layer=Layer.USER_PROFILE, num_processes="8")


# ------------------------------------------------------------------ Apple silicon (all of them)


def test_mps_is_used_without_any_flag_or_variable() -> None:
    plan = planned("mac_m2")
    assert (plan.settings.device, plan.settings.num_processes) == ("mps", 1)


@pytest.mark.parametrize("word", ["0", "false", "no", ""])
def test_a_switch_that_says_no_means_no(word: str) -> None:  # for Ludwig "0" means yes
    machine = detect_machine({"DISABLE_MPS": word}, Recorded(mac()))
    assert machine.mps


def test_a_switch_that_means_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="DISABLE_MPS is 'maybe'"):
        detect_machine({"DISABLE_MPS": "maybe"}, Recorded(mac()))


@pytest.mark.parametrize(
    ("environ", "values", "origin"),
    [
        ({}, {"device": "cpu"}, "flag --device"),
        ({}, {"device": "cpu", "layer": Layer.USER_PROFILE}, "user profile --device"),
        ({}, {"device": "cpu", "layer": Layer.ENVIRONMENT}, "environment --device"),
        ({"ACCELERATE_USE_CPU": "1"}, {}, "environment ACCELERATE_USE_CPU=1"),
    ],
)
def test_each_way_to_opt_out_of_mps_gives_cpu_and_its_origin(
    environ: dict[str, str], values: dict[str, Any], origin: str
) -> None:
    plan = planned("mac_m2", environ, **values)
    assert plan.settings.device == "cpu"
    assert origin in plan.settings.origin("device").brief
    assert planned("mac_m2", {"ACCELERATE_USE_CPU": "0"}).settings.device == "mps"


def test_an_outer_launchs_variable_is_no_opt_out_for_an_inner_one() -> None:
    environ = {"HEADWAY_RUN": "{}", "ACCELERATE_USE_CPU": "true"}
    assert planned("mac_m2", environ).settings.device == "mps"


@pytest.mark.wording
def test_disable_mps_opts_out_and_an_explicit_mps_is_refused_with_it() -> None:
    plan = planned("mac_disable_mps")
    assert plan.settings.device == "cpu"
    assert "DISABLE_MPS=1" in plan.settings.origin("device").brief
    assert "fix:  `unset DISABLE_MPS`" in refusal("mac_disable_mps", device="mps")


@pytest.mark.parametrize(
    ("environ", "values", "value"),
    [
        ({}, {}, "1"),
        ({"PYTORCH_ENABLE_MPS_FALLBACK": "0"}, {}, "0"),
        ({"PYTORCH_ENABLE_MPS_FALLBACK": "true"}, {}, "1"),
        ({"PYTORCH_ENABLE_MPS_FALLBACK": ""}, {}, "0"),
        ({}, {"mps_fallback": "strict"}, "0"),
        ({"PYTORCH_ENABLE_MPS_FALLBACK": "1"}, {"mps_fallback": "strict"}, "0"),
        ({"PYTORCH_ENABLE_MPS_FALLBACK": "0"}, {"mps_fallback": "on"}, "1"),
    ],
)
def test_the_fallback_is_in_the_environment_as_a_number(
    environ: dict[str, str], values: dict[str, Any], value: str
) -> None:
    changes = variables(planned("mac_m2", environ, **values))
    assert changes["PYTORCH_ENABLE_MPS_FALLBACK"] == value
    for plan in (planned("laptop_cpu", environ), planned("mac_m2", environ, device="cpu")):
        assert "PYTORCH_ENABLE_MPS_FALLBACK" not in variables(plan)


def test_a_fallback_that_torch_would_crash_on_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a boolean"):
        planned("mac_m2", {"PYTORCH_ENABLE_MPS_FALLBACK": "maybe"})


@pytest.mark.wording
def test_the_fallback_without_mps_has_no_effect_and_says_so() -> None:
    assert planned("laptop_cpu", mps_fallback="strict").notes == (
        "mps_fallback has no effect on cpu (flag --mps-fallback)",
    )


@pytest.mark.skipif(sys.platform == "darwin", reason="there the real thing runs")
@pytest.mark.processes
def test_the_fallback_is_set_before_python_starts(tmp_path: Path) -> None:
    """A faked Mac launches a real script, which sees the variable before it imports torch."""
    (tmp_path / "s.py").write_text(
        "import os, sys\nassert 'torch' not in sys.modules\n"
        "print(os.environ['PYTORCH_ENABLE_MPS_FALLBACK'])"
    )
    text = (
        "import sys\nfrom headway.commands import launch\n"
        "from headway.machine.facts import Machine\n"
        "launch.machine_from_flags = lambda parsed, environ: "
        "(Machine(system='Darwin', mps=True), environ)\n"
        f"launch.main(['-q', '--mps-fallback', 'strict', {str(tmp_path / 's.py')!r}])"
    )
    done = python("-c", text)
    assert done.stdout == "0\n", done.stderr


WHY_NO_MPS = {
    "laptop_cpu": ("not a Mac", "--device cpu"),
    "mac_12_2": ("macOS 12.2 is older than 12.3", "update macOS to 14.0 or newer, then"),
    "mac_13_new_torch": ("macOS 13.7.4 is older than 14.0", "update macOS to 14.0"),
    "mac_torch_without_mps": ("torch (1.11.0) is built without MPS", "pip install -U torch"),
    "mac_rosetta": ("an Intel build, emulated by Rosetta", "conda"),
    "mac_intel": ("this Mac has an Intel CPU", "--device cpu"),
    "mac_virtual": ("virtual machine", "--device cpu"),
}


@pytest.mark.parametrize("machine", WHY_NO_MPS)
def test_mps_that_cannot_be_used_is_refused_with_the_cause(machine: str) -> None:
    reason, fix = WHY_NO_MPS[machine]
    refused = refusal(machine, device="mps")
    assert reason in refused
    assert fix in refused.partition("fix:")[2]


def test_rosetta_is_answered_with_commands_for_conda_pyenv_and_uv() -> None:
    refused = refusal("mac_rosetta", device="mps")
    for command in ("conda create", "pyenv install", "uv python install"):
        assert command in refused


def test_a_torch_that_says_it_is_without_mps_is_believed() -> None:
    recording: Recording = mac(torch="__version__ = '2.13.0'\n")
    machine = detect_machine({}, Recorded(recording))
    assert machine.torch is not None
    from headway.machine.apple import with_mps

    without = machine._replace(torch=machine.torch._replace(mps=False))
    assert "built without MPS" in with_mps(without, {}, Recorded(recording)).mps_reason


def test_mps_is_one_device_in_one_process_and_cpu_ranks_are_the_way_out() -> None:
    refused = refusal("mac_m2", num_processes="2")
    assert "MPS supports only one process" in refused
    assert "device cpu" in refused
    assert planned("mac_m2", device="cpu", num_processes="2").settings.num_processes == 2
    assert planned("mac_m2").supervised is None  # no process group


def test_devices_select_gpus_and_not_mps() -> None:
    assert "which selects GPUs" in refusal("mac_m2", ConfigError, devices="2")
    for devices in ("1", "auto", "-1"):
        assert planned("mac_m2", device="mps", devices=devices).settings.num_processes == 1


@pytest.mark.parametrize(
    ("torch", "macos", "precision", "reason"),
    [
        ("2.4.1", "15.5", "fp16", "torch 2.4.1 does not support it on MPS; 2.5 does"),
        ("2.5.1", "15.5", "bf16", "torch 2.5.1 does not support it on MPS; 2.6 does"),
        ("2.6.0", "13.5", "bf16", "macOS 13.5 does not support it; macOS 14 does"),
        ("2.5.1", "13.5", "fp16", ""),
        ("2.13.0", "15.5", "bf16", ""),
    ],
)
def test_precision_on_mps_depends_on_the_versions_of_torch_and_macos(
    torch: str, macos: str, precision: str, reason: str
) -> None:
    from tests.machines.recorded import torch as version_file

    machine = detect_machine({}, Recorded(mac(macos, torch=version_file(torch))))
    if reason:
        with pytest.raises(MachineError, match=re.escape(reason)):
            plan_for(machine, mixed_precision=precision)
    else:
        assert plan_for(machine, mixed_precision=precision).settings.mixed_precision == precision


def test_a_failure_of_mps_says_where_to_report_it() -> None:
    for message, advice in (
        ("MPS backend failed to compile", "github.com/pytorch/pytorch/issues"),
        (
            "The operator 'aten::x' is not currently implemented for the MPS device.",
            "--mps-fallback on",
        ),
    ):
        crash = Crash(0.0, "RuntimeError", message, "Traceback ...")
        failure = find_failure([RankExit(0, 1, 1, 0.0, False, crash)], ranks=[0], world_size=1)
        assert failure is not None
        assert advice in failure.fix
