"""Intel's GPUs: detected, selected and planned for, from recorded machines."""

from __future__ import annotations

from typing import Any

import pytest

from headway.errors import Code
from headway.ipc.run_contract import read_run
from headway.machine.detection import detect_machine
from headway.machine.facts import Machine
from headway.settings.problems import problems
from tests.launcher.plan.planning import planned, refusal
from tests.launcher.plan.planning import set_by as variables
from tests.machines.recorded import RECORDINGS, Recorded, Recording, intel, load

FOUR = RECORDINGS["intel_4"]


def quick(recording: Recording, **environ: str) -> Machine:
    return detect_machine(environ, Recorded(recording))


def test_the_integrated_one_is_left_out_beside_others_as_torch_leaves_it_out() -> None:
    slots = [gpu.uuid for gpu in quick(FOUR).visible_gpus]
    assert slots == ["0000:18:00.0", "0000:4d:00.0", "0000:9a:00.0", "0000:b5:00.0"]
    alone = FOUR._replace(files=intel("0000:00:02.0"))
    assert [gpu.uuid for gpu in quick(alone).visible_gpus] == ["0000:00:02.0"]


def test_graphics_of_others_are_none_of_intels() -> None:
    files = {name: text.replace("8086:", "10DE:") for name, text in intel("0000:18:00.0").items()}
    assert quick(FOUR._replace(files=files)).best_device()[0] == "cpu"


@pytest.mark.parametrize(
    ("hierarchy", "mask", "names"),
    [
        ("COMPOSITE", "1,0", ["0", "1"]),  # a set
        ("COMPOSITE", "0.1,1.0,1.1", ["0.1", "1.0,1.1"]),
        ("COMPOSITE", "0.2,9,x,1", ["1"]),
        (None, "3", ["3"]),
        (None, None, ["0", "1"]),
        ("COMBINED", "0.0,3,4", ["3"]),
    ],
)
def test_cards_of_two_tiles_are_counted_as_level_zero_counts_them(
    hierarchy: str | None, mask: str | None, names: list[str]
) -> None:
    two = FOUR._replace(files=intel("0000:18:00.0", "0000:4d:00.0", model="0BD5"))
    given = {"ZE_FLAT_DEVICE_HIERARCHY": hierarchy, "ZE_AFFINITY_MASK": mask}
    environ = {name: text for name, text in given.items() if text is not None}
    machine = quick(two, CUDA_VISIBLE_DEVICES="", **environ)
    assert [name for name, _ in machine.named_gpus] == names


@pytest.mark.parametrize(
    ("settings", "mask"),
    [
        ({}, None),
        ({"devices": "3,1"}, "3,1"),
        ({"device": "gpu", "num_processes": "2"}, "0,1"),
        ({"device": "cpu"}, None),
    ],
)
def test_the_mask_of_a_launch_holds_the_gpus_of_its_ranks(
    settings: dict[str, Any], mask: str | None
) -> None:
    plan = planned("intel_4", **settings)
    assert variables(plan).get("ZE_AFFINITY_MASK") == mask
    assert "CUDA_VISIBLE_DEVICES" not in variables(plan)
    if "device" not in settings:
        assert (plan.settings.device, len(plan.gpus)) == ("xpu", 4 if mask is None else 2)
        run = read_run({"HEADWAY_RUN": str(variables(plan)["HEADWAY_RUN"])})
        assert run is not None
        assert run.device == "xpu"


def test_cards_are_whole_unless_the_environment_says_how_they_are_counted() -> None:
    name = "ZE_FLAT_DEVICE_HIERARCHY"
    assert variables(planned("intel_4"))[name] == "COMPOSITE"
    for given in (name, "ZE_AFFINITY_MASK"):
        assert name not in variables(planned("intel_4", {given: "0"}))


@pytest.mark.parametrize(
    ("machine", "device", "reason"),
    [
        ("intel_laptop", "xpu", "this torch (2.13.0+cpu) is built without XPU"),
        ("laptop_cpu", "xpu", "no Intel GPU on this machine"),
        ("gpu_4", "xpu", "no Intel GPU on this machine"),
        ("intel_4", "cuda", "this torch (2.13.0+xpu) is built without CUDA"),
        ("intel_4", "mps", "not a Mac"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_the_reason(
    machine: str, device: str, reason: str
) -> None:
    said = refusal(machine, device=device)
    assert reason in said
    assert ("download.pytorch.org/whl/xpu" in said) is (machine == "intel_laptop")


def test_more_ranks_than_gpus_are_refused_and_each_precision_is_planned() -> None:
    for precision in ("no", "bf16", "fp16"):
        assert planned("intel_4", mixed_precision=precision).gpus == (0, 1, 2, 3)
    settings = planned("intel_4").settings
    hidden = load("intel_4")._replace(mask="1")
    assert [problem.code for problem in problems(settings, hidden)] == [Code.TOO_FEW_GPUS]
