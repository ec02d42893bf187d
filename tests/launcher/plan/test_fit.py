"""`--fit`: a profile of another machine, adapted to this one without a silent change."""

from __future__ import annotations

from typing import Any

import pytest

from headway.contract.origin import Layer
from headway.errors import MachineError
from headway.launcher.plan.fit import fit
from headway.launcher.plan.plan import LaunchPlan, build_plan
from headway.launcher.plan.program import Program
from headway.settings.profile import Entries
from headway.settings.resolve import resolve
from headway.settings.table import Settings
from tests.launcher.plan.planning import said
from tests.machines.recorded import load


def fitted(
    machine: str, layer: Layer = Layer.USER_PROFILE, **values: Any
) -> tuple[LaunchPlan, str]:
    there = load(machine)
    layers = [said(layer, **values)]

    def settle(some: list[Entries]) -> Settings:
        return resolve(some, there, {})

    layers, changes = fit(layers, there, settle)
    plan = build_plan(settle(layers), there, Program("a.py"), python=["python"], environ={})
    return plan, "\n".join(changes)


EIGHT_GPUS: dict[str, Any] = {"device": "cuda", "num_processes": "8", "mixed_precision": "bf16"}


@pytest.mark.wording
def test_a_profile_of_eight_gpus_becomes_one_process_on_a_laptop() -> None:
    plan, changes = fitted("laptop_cpu", **EIGHT_GPUS)
    assert (plan.settings.device, plan.settings.num_processes) == ("cpu", 1)
    assert "device cuda -> cpu (user profile --device; no NVIDIA driver" in changes
    assert "num_processes 8 -> 1" in changes
    assert "flag --fit (instead of user profile --device)" in str(plan.settings.origin("device"))


def test_it_becomes_four_processes_on_four_gpus() -> None:
    plan, changes = fitted("gpu_4", **EIGHT_GPUS)
    assert plan.gpus == (0, 1, 2, 3)
    assert changes.startswith("--fit: num_processes 8 -> 4")
    assert len(changes.splitlines()) == 1


def test_gpus_that_are_not_there_become_all_that_are() -> None:
    plan, changes = fitted("gpu_2_one_busy", devices=["0", "5"])
    assert plan.gpus == (0, 1)
    assert "devices 0,5 -> all" in changes


def test_devices_are_left_out_where_there_are_no_gpus() -> None:
    plan, changes = fitted("laptop_cpu", device="cuda", devices="3")
    assert plan.settings.num_processes == 1
    assert "devices 3 -> all" in changes


def test_a_mac_gets_its_own_gpu() -> None:
    plan, _ = fitted("mac_m2", **EIGHT_GPUS)
    assert (plan.settings.device, plan.settings.num_processes) == ("mps", 1)


@pytest.mark.parametrize(
    ("machine", "asked", "held"),
    [("gpu_mixed", "bf16", "fp16"), ("laptop_cpu", "fp16", "no"), ("gpu_4", "bf16", "bf16")],
)
def test_a_precision_that_is_missing_becomes_the_next_one(
    machine: str, asked: str, held: str
) -> None:
    assert fitted(machine, mixed_precision=asked)[0].settings.mixed_precision == held


def test_cpu_ranks_that_were_asked_for_stay() -> None:
    plan, changes = fitted("laptop_cpu", device="cpu", num_processes="4")
    assert (plan.settings.num_processes, changes) == (4, "")


def test_a_profile_that_fits_is_left_alone() -> None:
    plan, changes = fitted("gpu_8_h100", devices="1,3", mixed_precision="bf16")
    assert (plan.gpus, changes) == ((1, 3), "")


def test_idle_gpus_become_as_many_as_are_idle() -> None:
    plan, changes = fitted("gpu_2_one_busy", devices="idle:2", num_processes="2")
    assert plan.gpus == (1,)
    assert "devices idle:2 -> idle:1" in changes


def test_where_no_gpu_is_idle_none_that_is_busy_is_taken() -> None:
    with pytest.raises(MachineError, match="only 0 of 2 GPUs are idle"):
        fitted("amd_2", devices="idle:2")


def test_what_was_typed_is_refused_and_not_adapted() -> None:
    with pytest.raises(MachineError, match="device is 'cuda'"):
        fitted("laptop_cpu", Layer.FLAG, device="cuda")
